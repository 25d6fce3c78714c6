"""sglang-capture: the recorder, fed as the engine feeds it. A batch of prompts begins, its layers hand over rows one
after the other, the dumps are checked and published; then whoever packs them hands their pages back, or removes them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import HIDDEN_SIZE, LAYERS, Rows
from sglang_capture import spool
from sglang_capture.capture import CaptureRequest
from sglang_capture.claim import claim_spool
from sglang_capture.quota import Account
from sglang_capture.recorder import Recorder
from sglang_capture.slabs import hand_back
from sglang_capture.spec import CaptureSpec

BATCH = 8
"""Prompts of one forward."""

SPEC = CaptureSpec(
    layers=LAYERS,
    last_hidden="post",
    hidden_size=HIDDEN_SIZE,
    num_layers=61,
    vocab_size=163840,
    dtype="bfloat16",
    architecture="DeepseekV3ForCausalLM",
    model_path="benchmark",
)


class Captures:
    """Fills :data:`BATCH` dumps with the same rows, over and over.

    Args:
        reuse: whether the pages of the last batch are those of the next.
    """

    def __init__(self, recorder: Recorder, rows: Rows, *, reuse: bool):
        self._recorder = recorder
        self._rows = rows
        self._reuse = reuse
        self.engine_seconds = 0.0
        """Of the last batch, those in which the engine's thread was held up."""

    def __call__(self, number: int) -> None:
        names = [f"prompt-{number}-{index}" for index in range(BATCH)]
        start = time.perf_counter()
        self._fill(names)
        self.engine_seconds = time.perf_counter() - start
        while self._recorder.counts.published < (number + 1) * BATCH:
            time.sleep(0.0001)
        for name in names:
            directory = self._recorder.directory
            if self._reuse:
                hand_back(directory, name, spool.dump_path(directory, name).stat().st_ino)
            else:
                spool.remove(directory, name)

    def _fill(self, names: list[str]) -> None:
        recorder, rows = self._recorder, self._rows
        recorder.begin_forward()
        captures = [recorder.begin(CaptureRequest(name, name, SPEC, rows.input_ids, lambda: None)) for name in names]
        for key, state in zip((*LAYERS, "last_hidden_state"), (*rows.layers, rows.last), strict=True):
            for capture in captures:
                recorder.copy(capture, key, state, 0)
        for capture in captures:
            recorder.commit(capture, 0, len(rows.input_ids))


@contextmanager
def captures(directory: Path, rows: Rows, *, reuse: bool) -> Iterator[Captures]:
    """A recorder on a spool of its own."""
    place = directory / ("reused" if reuse else "fresh")
    with (
        contextlib.closing(claim_spool(place, "benchmark")),
        contextlib.closing(Recorder(place, Account(1 << 40), rank="benchmark", device="cpu")) as recorder,
    ):
        yield Captures(recorder, rows, reuse=reuse)
