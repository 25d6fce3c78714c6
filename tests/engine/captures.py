"""What the engine tests share: spools of their own, waiting for a capture, and comparing one with the oracle."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from engine.oracle import Oracle, Run
from engine.server import EngineServer
from sglang_capture.dump import Dump, load_dump
from sglang_capture.spec import LAST_HIDDEN_KEYS
from sglang_capture.spool import (
    Counts,
    Failure,
    dump_path,
    dumps,
    failure_path,
    failures,
    read_failure,
    read_rank_statuses,
    read_status,
)

FLOAT32_TOLERANCE = 1e-5
"""Relative error of a row; a few 1e-7 is what is seen."""

WAIT_SECONDS = 60


@contextmanager
def spool_directory() -> Iterator[Path]:
    """A directory in shared memory, for the length of a ``with`` block."""
    parent = Path(tempfile.mkdtemp(prefix="sglang-capture-test-", dir="/dev/shm"))
    try:
        yield parent / "spool"
    finally:
        shutil.rmtree(parent, ignore_errors=True)


class CapturingServer(EngineServer):
    """An engine with the plugin, and its spool."""

    def __init__(
        self, model_dir: Path, spool: Path, *arguments: str, engine: dict[str, str] | None = None, **settings: str
    ) -> None:
        """``settings`` become ``SGLANG_CAPTURE_…``; ``engine``: SGLang's own variables, read while it is imported."""
        ours = {f"SGLANG_CAPTURE_{name.upper()}": value for name, value in settings.items()}
        env = {"SGLANG_CAPTURE_DIR": str(spool), **ours, **(engine or {})}
        super().__init__(model_dir, *arguments, plugins="sglang_capture", env=env, fresh=bool(engine))
        self.spool = spool

    def capture(self, input_ids: Any, mark: dict[str, Any], **more: Any) -> Any:
        return self.generate(input_ids, custom_params=mark, **more)

    def dump(self, capture_id: str) -> Dump:
        """The dump of a capture, when it is there; a failure instead raises."""
        path = dump_path(self.spool, capture_id)
        for _ in _until_deadline():
            if path.exists():
                return load_dump(path)
            failure = read_failure(failure_path(self.spool, capture_id))
            if failure is not None:
                raise AssertionError(f"{capture_id} {failure.kind}: {failure.reason}")
        raise AssertionError(f"{capture_id} neither came nor failed; the log ends: {self.log_text()[-3000:]}")

    def failure(self, capture_id: str) -> Failure:
        """Why a capture has no dump, when it is written."""
        for _ in _until_deadline():
            failure = read_failure(failure_path(self.spool, capture_id))
            if failure is not None:
                assert not dump_path(self.spool, capture_id).exists()
                return failure
        raise AssertionError(f"{capture_id} did not fail; the log ends: {self.log_text()[-3000:]}")

    def end_of(self, capture_id: str) -> Literal["dump", "failed"]:
        """How a capture ended, when it has."""
        for _ in _until_deadline():
            if dump_path(self.spool, capture_id).exists():
                return "dump"
            if failure_path(self.spool, capture_id).exists():
                return "failed"
        raise AssertionError(f"{capture_id} neither came nor failed; the log ends: {self.log_text()[-3000:]}")

    def counts(self) -> Counts:
        """The counts of all ranks together, in a status written after each rank had written its own after this call."""
        asked, last = time.time(), 0.0
        for _ in _until_deadline():
            status = read_status(self.spool)
            oldest = min((rank.time for rank in read_rank_statuses(self.spool)), default=0.0)
            if not last and oldest > asked:
                last = time.time()
            if status is not None and last and status.time > last:
                return status.counts
        raise AssertionError("the status is not written any more")

    def clear_spool(self) -> None:
        """Remove all dumps and failures, and wait until the plugin knows."""
        for path in (*dumps(self.spool), *failures(self.spool)):
            path.unlink(missing_ok=True)
        self.counts()

    def assert_serving(self) -> None:
        assert self.generate([20, 21, 22])["meta_info"]["prompt_tokens"] == 3


class Wish(NamedTuple):
    """One request of many: a prompt, the capture's id (``None``: not marked), and what else the mark says."""

    prompt: list[int]
    name: str | None
    mark: dict[str, Any] = {}  # noqa: RUF012  (never changed)


def send_all(server: CapturingServer, wishes: Sequence[Wish], **more: Any) -> list[Any]:
    """All of them at once; the answers in order."""

    def send(wish: Wish) -> Any:
        return server.capture(wish.prompt, {"capture": wish.name, **wish.mark} if wish.name else None, **more)

    with ThreadPoolExecutor(len(wishes)) as pool:
        return list(pool.map(send, wishes))


def assert_all_agree(server: CapturingServer, oracle: Oracle, wishes: Sequence[Wish]) -> None:
    for wish in wishes:
        if wish.name:
            assert_rows_agree(server.dump(wish.name), oracle, wish.prompt)


def assert_rows_agree(
    dump: Dump, oracle: Oracle, input_ids: Sequence[int], tolerance: float = FLOAT32_TOLERANCE
) -> None:
    """Every row of every tensor against transformers; the embeddings exactly."""
    assert dump.input_ids.tolist() == list(input_ids)
    assert_equals_run(dump, oracle.run(input_ids), tolerance)


def assert_equals_run(
    dump: Dump, run: Run, tolerance: float = FLOAT32_TOLERANCE, exact: torch.Tensor | None = None
) -> None:
    """The same against one forward of the oracle.

    Args:
        exact: the rows whose index 0 is a token's embedding; an image's come out of a computation.
    """
    for number, index in enumerate(dump.spec.layers):
        found, expected = dump.hidden_states[:, number], run.hidden_states[index]
        if index == 0:
            same = found.float() == expected.to(found.dtype).float()
            assert same.all(-1)[slice(None) if exact is None else exact].all(), "the embeddings differ"
        error = relative_error(found, expected)
        assert error < tolerance, f"hidden-state index {index} differs by {error:.1e}"
    states = {LAST_HIDDEN_KEYS["post"]: run.hidden_states[-1], LAST_HIDDEN_KEYS["pre"]: run.prenorm}
    assert dump.last_hidden.keys() == set(dump.spec.last_hidden_keys)
    for key, found in dump.last_hidden.items():
        error = relative_error(found, states[key])
        assert error < tolerance, f"{key} differs by {error:.1e}"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's ``|found - expected| / |expected|``."""
    assert found.shape == expected.shape
    difference = (found.float() - expected.float()).norm(dim=-1)
    return float((difference / expected.float().norm(dim=-1)).max())


def _until_deadline() -> Iterator[None]:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)
