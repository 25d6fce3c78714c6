"""Verify: recompute some captures with transformers, and say how far each kind of row is from it.

The error of a row is ``|found - expected| / |expected|``. What is allowed depends on the coarser of the two precisions,
that of the capture and that of the oracle:

- float32: every row within 1e-5 (1e-6 is usual; a real fault is off by 0.1 and more), and index 0 exact.
- bfloat16: the middle row (median) of each kind within 0.05, and no row beyond 0.5. Rounding adds up over the layers:
  61 layers were seen to end at 0.02, while the next layer's state is 0.1 away. Single rows may be further off, where a
  router was nearly tied and rounding picked another expert (0.26 was seen); a row of another token is 1 away or more.
- float16, with three more bits: 0.01, and 0.5.

Beside that, each kind of row must be nearer to what it claims to be than to any other state of the same prompt; if it
is not, the report says what it looks like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import torch
from pydantic import BaseModel, Field, PlainSerializer

from sglang_capture.dump import Dump
from sglang_capture.errors import CaptureError
from sglang_capture.oracle import Oracle, States
from sglang_capture.spec import LAST_HIDDEN_KEYS, CaptureSpec
from sglang_capture.verify_sources import open_source

RelativeError = Annotated[
    float, PlainSerializer(lambda error: error if math.isfinite(error) else "Infinity", when_used="json")
]
"""The error of a row; JSON has no infinity, so there it is the string ``Infinity``."""

Progress = Callable[[int, int], None]
"""Called with the captures recomputed and how many there will be."""

_PROBES: Final = 64
"""Rows of a capture, spread over it, that are compared with every state to find the nearest."""


class VerifyError(CaptureError):
    """There is nothing to compare, or not with this model."""


class Bound(NamedTuple):
    """The largest error that is allowed: of the median row of each capture, and of any row."""

    middle: float
    worst: float


BOUNDS: Final = {"float32": Bound(1e-5, 1e-5), "bfloat16": Bound(0.05, 0.5), "float16": Bound(0.01, 0.5)}

EMBEDDING_BOUNDS: Final = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}
"""For index 0, where nothing was computed: at most the rounding of the weights."""


class KindReport(BaseModel):
    """One kind of row: a hidden-state index, or a last hidden state."""

    name: str
    ok: bool
    worst_error: RelativeError = Field(
        description="largest relative error of a row; infinite where one holds NaN or Inf"
    )
    middle_error: RelativeError = Field(description="largest median of a capture")
    allowed_worst: float
    allowed_middle: float
    sample_id: str = Field(description="where the worst row is")
    row: int
    looks_like: str = Field(
        default="", description="what the rows are instead, where they are not what they claim to be"
    )


class VerifyReport(BaseModel):
    """What was compared, and the verdict."""

    ok: bool
    source: str
    model: str
    samples: int
    tokens: int
    dtype: str = Field(description="of the captures")
    oracle_dtype: str = Field(description="in which transformers computed")
    worst_error: RelativeError
    kinds: list[KindReport]


@dataclass
class _Kind:
    """What was seen so far of one kind of row."""

    bound: Bound
    worst: float = -1.0
    middle: float = -1.0
    where: tuple[str, int] = ("", 0)
    looks_like: str = ""

    def add(self, sample_id: str, errors: torch.Tensor, looks_like: str) -> None:
        worst, row = errors.max(dim=0)
        if float(worst) > self.worst:
            self.worst, self.where = float(worst), (sample_id, int(row))
        self.middle = max(self.middle, float(errors.median()))
        self.looks_like = self.looks_like or looks_like

    def report(self, name: str) -> KindReport:
        return KindReport(
            name=name,
            ok=self.worst <= self.bound.worst and self.middle <= self.bound.middle and not self.looks_like,
            worst_error=self.worst,
            middle_error=self.middle,
            allowed_worst=self.bound.worst,
            allowed_middle=self.bound.middle,
            sample_id=self.where[0],
            row=self.where[1],
            looks_like=self.looks_like,
        )


def verify_dataset(
    source: Path,
    *,
    model: str | None = None,
    sample: int = 8,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    tolerance: float | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> VerifyReport:
    """Recompute ``sample`` captures of a dataset, a spool, one dump, or an export of ours.

    Args:
        model: where the weights are; as the captures say by default.
        seed: which captures are taken; the same seed takes the same ones.
        dtype: in which transformers computes.
        device: where it computes, as ``Oracle.load`` takes it.
        tolerance: allow each row this error instead of what the precision allows (index 0 keeps its own bound).

    Raises:
        VerifyError: there is nothing to verify, or the model is not the one that was captured.
        CaptureError: ``source`` is none of these or is damaged, or the model cannot be loaded.
    """
    captures = open_source(source)
    chosen = captures.choose(sample, seed)
    if not chosen:
        raise VerifyError(f"{source} holds no captures: nothing to verify")
    path = model or captures.load(chosen[0]).spec.model_path
    oracle = Oracle.load(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    report = verify_dumps(
        map(captures.load, chosen), oracle, tolerance=tolerance, progress=lambda done: progress(done, len(chosen))
    )
    return report.model_copy(update={"source": str(source), "model": path})


def verify_dumps(
    dumps: Iterable[Dump],
    oracle: Oracle,
    *,
    tolerance: float | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> VerifyReport:
    """Compare ``dumps`` with what ``oracle`` computes for their prompts.

    Raises:
        VerifyError: there is no dump, or one is of a model of another size than the oracle's.
    """
    kinds: dict[str, _Kind] = {}
    samples, tokens, dtype = 0, 0, ""
    for dump in dumps:
        _check_model(dump.spec, oracle)
        states = oracle.states(dump.input_ids)
        precision = _coarser(dump.spec.dtype, oracle.dtype)
        for name, found in _kinds_of(dump).items():
            expected = _named_states(states)[name]
            kind = kinds.setdefault(name, _Kind(_bound(name, precision, tolerance)))
            kind.add(dump.capture_id, relative_errors(found, expected), _nearest(found, name, states))
        samples, tokens, dtype = samples + 1, tokens + dump.tokens, dump.spec.dtype
        progress(samples)
    if not kinds:
        raise VerifyError("no captures to verify")
    reports = [kind.report(name) for name, kind in kinds.items()]
    return VerifyReport(
        ok=all(report.ok for report in reports),
        source="",
        model="",
        samples=samples,
        tokens=tokens,
        dtype=dtype,
        oracle_dtype=oracle.dtype,
        worst_error=max(report.worst_error for report in reports),
        kinds=reports,
    )


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``|found - expected| / |expected|`` of each row, float32 ``[T]``; infinite where a row holds NaN or Inf."""
    found, expected = found.float(), expected.float()
    difference, size = (found - expected).norm(dim=-1), expected.norm(dim=-1)
    errors = torch.where(difference == 0, 0.0, difference / size)
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _kinds_of(dump: Dump) -> dict[str, torch.Tensor]:
    """The rows of a dump by name, ``[T, H]`` each."""
    layers = {_index_name(index): dump.hidden_states[:, slot] for slot, index in enumerate(dump.spec.layers)}
    return {**layers, **dump.last_hidden}


def _named_states(states: States) -> dict[str, torch.Tensor]:
    layers = {_index_name(index): rows for index, rows in enumerate(states.hidden)}
    return {**layers, LAST_HIDDEN_KEYS["post"]: states.post, LAST_HIDDEN_KEYS["pre"]: states.pre}


def _nearest(found: torch.Tensor, name: str, states: States) -> str:
    """What ``found`` is clearly nearer to (less than half as far) than to what it claims to be, or nothing."""
    rows = torch.linspace(0, len(found) - 1, min(len(found), _PROBES)).long()
    named = _named_states(states)
    candidates = {other: relative_errors(found[rows], expected[rows]) for other, expected in named.items()}
    for step, words in ((-1, "of the token before"), (1, "of the token after")):
        kept = rows[(rows + step >= 0) & (rows + step < len(found))]
        if len(kept):
            candidates[f"{name} {words}"] = relative_errors(found[kept], named[name][kept + step])
    distances = {other: float(errors.median()) for other, errors in candidates.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] < distances[name] / 2 else ""


def _index_name(index: int) -> str:
    return f"index {index}"


def _coarser(one: str, other: str) -> str:
    """The precision in which a comparison can be made."""
    return max(one, other, key=lambda dtype: BOUNDS[dtype].middle)


def _bound(name: str, precision: str, tolerance: float | None) -> Bound:
    if name == _index_name(0):
        return Bound(EMBEDDING_BOUNDS[precision], EMBEDDING_BOUNDS[precision])
    return BOUNDS[precision] if tolerance is None else Bound(tolerance, tolerance)


def _check_model(spec: CaptureSpec, oracle: Oracle) -> None:
    captured, found = (spec.num_layers, spec.hidden_size), (oracle.num_layers, oracle.hidden_size)
    if captured != found:
        raise VerifyError(
            f"the captures are of a model with {captured[0]} layers of hidden size {captured[1]}, and the model to "
            f"compare with has {found[0]} of {found[1]}: name the right one with --model"
        )
