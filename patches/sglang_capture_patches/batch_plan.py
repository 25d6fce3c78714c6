"""After ``ForwardBatch.init_new``: which rows of this prefill forward belong to which capture.

Rows of an extend batch are the concatenation of its requests in ``batch.reqs`` order; request ``j`` computes the prompt
positions ``[prefix_len, prefix_len + extend_len)``. A row is kept if its position lies inside the prompt. That one rule
serves chunked prefill, mixed chunks (decode tails lie behind the prompt), retraction (positions come again) and padding
(rows behind the last request belong to none).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_capture_patches import runtime
from sglang_capture_patches.marked import Marked

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_sglang_capture_plan"

PROMPT_MODES = {"EXTEND", "MIXED"}
"""Names of the forward modes that compute prompt rows; verification and draft modes have names of their own."""


@dataclass
class Segment:
    """Rows ``[start, stop)`` of a batch: the prompt positions from ``position`` on of one marked request."""

    marked: Marked
    start: int
    stop: int
    position: int
    seen: set[int | str] = field(default_factory=set)


@dataclass
class Plan:
    """What one forward has to hand over.

    Attributes:
        rows: rows of the batch's real requests; a tensor with fewer is not the whole residual stream.
    """

    runtime: runtime.Runtime
    segments: list[Segment]
    rows: int

    @property
    def keys(self) -> set[int | str]:
        return set().union(*(segment.marked.keys for segment in self.segments))

    def take(self, key: int | str, tensor: torch.Tensor) -> None:
        """Copy the marked rows of one layer's residual stream, or one last hidden state, ``[rows or more, H]``."""
        if tensor.shape[0] < self.rows:
            self.fail(f"{key} came with {tensor.shape[0]} rows, and the batch has {self.rows}")
            return
        filler = self.runtime.filler
        for segment in self.segments:
            if key not in segment.marked.keys:
                continue
            segment.seen.add(key)
            if filler is not None and segment.marked.capture is not None:
                rows = tensor[segment.start : segment.stop]
                filler.copy(segment.marked.capture, key, rows, segment.position)

    def commit(self) -> None:
        """The forward is over: enter what came, and fail what did not come whole."""
        filler = self.runtime.filler
        for segment in self.segments:
            capture = segment.marked.capture
            if filler is None or capture is None:
                continue
            missing = segment.marked.keys - segment.seen
            if missing:
                filler.fail(capture, f"the model did not hand over {sorted(map(str, missing))}")
            else:
                filler.commit(capture, segment.position, segment.position + segment.stop - segment.start)

    def fail(self, reason: str) -> None:
        """End every capture of this forward."""
        filler = self.runtime.filler
        for segment in self.segments:
            if filler is not None and segment.marked.capture is not None:
                filler.fail(segment.marked.capture, reason)


def plan_of(forward_batch: Any) -> Plan | None:
    """The plan that :func:`after_init_new` left on a batch."""
    plan: Plan | None = getattr(forward_batch, _ATTRIBUTE, None)
    return plan


def after_init_new(result: Any, _cls: type, batch: Any, model_runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """Leave a plan on the new forward batch if it holds rows of a marked prompt. Never raises."""
    current = runtime.of(model_runner)
    if current is None:
        return
    try:
        if result.forward_mode.name in PROMPT_MODES:
            plan = _make_plan(current, result, batch.reqs)
            if plan is not None:
                setattr(result, _ATTRIBUTE, plan)
    except Exception:
        logger.exception("sglang-capture: a batch could not be planned; its captures will be missing")


def _make_plan(current: runtime.Runtime, forward_batch: Any, reqs: list[Any]) -> Plan | None:
    current.counts.forwards += 1
    if not any(current.may_be_marked(req) for req in reqs):
        return None
    if current.filler is not None:
        current.filler.begin_forward()
    segments = []
    start = 0
    # strict=False: padding appends lengths that belong to no request.
    lengths = zip(reqs, forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, strict=False)
    for req, length, prefix in lengths:
        marked = current.admit(req)
        if marked is not None:
            inside = min(length, len(req.origin_input_ids) - prefix)
            if inside > 0:
                segments.append(Segment(marked, start, start + inside, prefix))
        start += length
    if not segments:
        return None
    current.counts.captured_forwards += 1
    return Plan(current, segments, start)
