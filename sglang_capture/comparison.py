"""Rows beside the rows they should be: how far off each is, where they first differ, what they look like instead.

Rows come as a dictionary from a kind's name (``index 3``, ``last_hidden_state``…) to ``[T, H]``. The error of a row is
``|found - expected| / |expected|``. What is allowed depends on the coarser of the two precisions:

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import torch
from pydantic import BaseModel, Field, PlainSerializer

from sglang_capture.dump import Dump
from sglang_capture.spec import LAST_HIDDEN_KEYS

RelativeError = Annotated[
    float, PlainSerializer(lambda error: error if math.isfinite(error) else "Infinity", when_used="json")
]
"""The error of a row; JSON has no infinity, so there it is the string ``Infinity``."""

Rows = Mapping[str, torch.Tensor]
"""The rows of one prompt, ``[T, H]`` each, by the name of their kind."""

_PROBES: Final = 64
"""Rows of a capture, spread over it, that are compared with every state to find the nearest."""


class Bound(NamedTuple):
    """The largest error that is allowed: of the median row of each capture, and of any row."""

    middle: float
    worst: float


BOUNDS: Final = {"float32": Bound(1e-5, 1e-5), "bfloat16": Bound(0.05, 0.5), "float16": Bound(0.01, 0.5)}

EMBEDDING_BOUNDS: Final = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}
"""For index 0, where nothing was computed: at most the rounding of the weights."""


class Difference(BaseModel):
    """One row that is not what it should be."""

    name: str = Field(description="the kind of row: a hidden-state index, or a last hidden state")
    sample_id: str
    position: int = Field(description="in the prompt, from 0")
    token_id: int
    error: RelativeError
    allowed: float | None = Field(
        description="what the error exceeds; null where the row is only nearer to another state than to its own"
    )


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
    rows: int = Field(default=0, description="rows compared")
    rows_off: int = Field(default=0, description="rows that differ by more than is allowed")
    first_difference: Difference | None = Field(
        default=None, description="the earliest position at which a row differs by more than is allowed"
    )


@dataclass
class Kind:
    """What was seen so far of one kind of row.

    Attributes:
        depth: how much of the model was run for it, so that kinds can be ordered.
    """

    name: str
    bound: Bound
    depth: int
    worst: float = -1.0
    middle: float = -1.0
    where: tuple[str, int] = ("", 0)
    looks_like: str = ""
    rows: int = 0
    rows_off: int = 0
    first: Difference | None = None

    def add(self, sample_id: str, input_ids: torch.Tensor, found: Rows, expected: Rows) -> None:
        """Compare the rows of this kind in one capture; ``expected`` may hold other kinds, for what they look like."""
        errors = relative_errors(found[self.name], expected[self.name])
        worst, row = errors.max(dim=0)
        middle = float(errors.median())
        if float(worst) > self.worst:
            self.worst, self.where = float(worst), (sample_id, int(row))
        self.middle = max(self.middle, middle)
        self.rows += len(errors)
        off = errors > self.bound.worst
        if middle > self.bound.middle:
            off |= errors > self.bound.middle
        likeness = nearest(found[self.name], self.name, expected)
        if likeness is not None:
            self.looks_like = self.looks_like or likeness.name
            off |= likeness.errors < errors
        self._enter(sample_id, input_ids, errors, off)

    def _enter(self, sample_id: str, input_ids: torch.Tensor, errors: torch.Tensor, off: torch.Tensor) -> None:
        """Count the rows that are ``off``, and keep the earliest."""
        if not bool(off.any()):
            return
        self.rows_off += int(off.sum())
        position = int(off.int().argmax())
        if self.first is None or position < self.first.position:
            error = float(errors[position])
            allowed = max((limit for limit in self.bound if error > limit), default=None)
            self.first = Difference(
                name=self.name,
                sample_id=sample_id,
                position=position,
                token_id=int(input_ids[position]),
                error=error,
                allowed=allowed,
            )

    def report(self) -> KindReport:
        return KindReport(
            name=self.name,
            ok=self.first is None and not self.looks_like,
            worst_error=self.worst,
            middle_error=self.middle,
            allowed_worst=self.bound.worst,
            allowed_middle=self.bound.middle,
            sample_id=self.where[0],
            row=self.where[1],
            looks_like=self.looks_like,
            rows=self.rows,
            rows_off=self.rows_off,
            first_difference=self.first,
        )


class Comparison:
    """Captures compared so far, kind by kind."""

    def __init__(self, tolerance: float | None = None) -> None:
        self._tolerance = tolerance
        self._kinds: dict[str, Kind] = {}

    def add(self, dump: Dump, expected: Rows, dtype: str) -> None:
        """Compare a capture with the rows that were computed in ``dtype`` for its prompt."""
        found = rows_of(dump)
        for name in found:
            if name not in self._kinds:
                bound = bound_of(name, coarser(dump.spec.dtype, dtype), self._tolerance)
                self._kinds[name] = Kind(name, bound, _depth(name, dump.spec.num_layers))
            self._kinds[name].add(dump.capture_id, dump.input_ids, found, expected)

    @property
    def kinds(self) -> list[KindReport]:
        return [kind.report() for kind in self._kinds.values()]

    @property
    def first_difference(self) -> Difference | None:
        """Where it begins: in the lowest layer that differs, at its earliest position."""
        off = sorted((kind for kind in self._kinds.values() if kind.first), key=lambda kind: kind.depth)
        return off[0].first if off else None


def rows_of(dump: Dump) -> dict[str, torch.Tensor]:
    """The rows of a dump by name, ``[T, H]`` each."""
    layers = {index_name(index): dump.hidden_states[:, slot] for slot, index in enumerate(dump.spec.layers)}
    return {**layers, **dump.last_hidden}


def index_name(index: int) -> str:
    return f"index {index}"


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``|found - expected| / |expected|`` of each row, float32 ``[T]``; infinite where a row holds NaN or Inf."""
    found, expected = found.float(), expected.float()
    difference, size = (found - expected).norm(dim=-1), expected.norm(dim=-1)
    errors = torch.where(difference == 0, 0.0, difference / size)
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


class Likeness(NamedTuple):
    """Another state that rows are nearer to than to what they claim to be; infinite where it has no such row."""

    name: str
    errors: torch.Tensor


def nearest(found: torch.Tensor, name: str, expected: Rows) -> Likeness | None:
    """What ``found`` is clearly nearer to (less than half as far) than to the rows called ``name``, or nothing."""
    probes = torch.linspace(0, len(found) - 1, min(len(found), _PROBES)).long()
    best, distance = "", float(relative_errors(found[probes], expected[name][probes]).median()) / 2
    best_errors: Callable[[torch.Tensor], torch.Tensor] | None = None
    for words, errors_at in _candidates(found, name, expected):
        errors = errors_at(probes)
        there = errors[~errors.isnan()]
        if len(there) and float(there.median()) < distance:
            best, distance, best_errors = words, float(there.median()), errors_at
    if best_errors is None:
        return None
    return Likeness(best, best_errors(torch.arange(len(found))).nan_to_num(nan=torch.inf, posinf=torch.inf))


def _candidates(
    found: torch.Tensor, name: str, expected: Rows
) -> Iterator[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """All other states, and the state itself moved by one token either way: the errors at some positions (NaN where
    there is no such row)."""

    def errors_against(rows: torch.Tensor, step: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def errors_at(positions: torch.Tensor) -> torch.Tensor:
            there = (positions + step >= 0) & (positions + step < len(rows))
            errors = torch.full((len(positions),), torch.nan)
            kept = positions[there]
            errors[there] = relative_errors(found[kept], rows[kept + step])
            return errors

        return errors_at

    for other, rows in expected.items():
        if other != name:
            yield other, errors_against(rows, 0)
    for step, words in ((-1, "of the token before"), (1, "of the token after")):
        yield f"{name} {words}", errors_against(expected[name], step)


def coarser(one: str, other: str) -> str:
    """The precision in which a comparison can be made."""
    return max(one, other, key=lambda dtype: BOUNDS[dtype].middle)


def bound_of(name: str, precision: str, tolerance: float | None = None) -> Bound:
    """What a kind of row may be off by."""
    if name == index_name(0):
        return Bound(EMBEDDING_BOUNDS[precision], EMBEDDING_BOUNDS[precision])
    return BOUNDS[precision] if tolerance is None else Bound(tolerance, tolerance)


def _depth(name: str, num_layers: int) -> int:
    """Kinds in the order in which a forward computes them."""
    last = {LAST_HIDDEN_KEYS["pre"]: num_layers, LAST_HIDDEN_KEYS["post"]: num_layers + 1}
    return last[name] if name in last else int(name.removeprefix("index "))
