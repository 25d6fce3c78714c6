"""What captures say about themselves, without a second model: each function lists what is wrong, in words.

A wrong *layer* cannot be seen this way: rows of layer 30 under the name 31 are as consistent as the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from sglang_capture.comparison import BOUNDS, bound_of, index_name, relative_errors, rows_of
from sglang_capture.dump import Dump
from sglang_capture.spec import LAST_HIDDEN_KEYS

_NORM_SPREAD: Final = 1.05
"""The normed rows, freed of the norm's weight, have one size; so much may the largest exceed the smallest."""


class Agreement(NamedTuple):
    """Two captures of the same tokens side by side."""

    faults: list[str]
    worst: float
    identical: bool


def prompt_faults(dump: Dump, input_ids: Sequence[int]) -> list[str]:
    """Is it this prompt, all of it?"""
    if dump.input_ids.tolist() != list(input_ids):
        return [f"holds {dump.tokens} token ids that are not the {len(input_ids)} that were sent"]
    short = [f"{name} has {len(rows)} rows" for name, rows in rows_of(dump).items() if len(rows) != len(input_ids)]
    return [f"{fault}, and the prompt has {len(input_ids)}" for fault in short]


def row_faults(dump: Dump) -> list[str]:
    """Rows that nobody computed: NaN or Inf, all zero, or a copy of the one before (no two neighbours of the prompt may
    be the same token); and states that are one and the same."""
    faults = []
    named = rows_of(dump)
    for name, rows in named.items():
        finite, zero = rows.isfinite().all(dim=-1), (rows == 0).all(dim=-1)
        twice = torch.zeros_like(zero)
        twice[1:] = (rows[1:] == rows[:-1]).all(dim=-1) & ~zero[1:]
        faults += _counted(name, ~finite, "hold NaN or Inf")
        faults += _counted(name, zero, "are all zero")
        faults += _counted(name, twice, "repeat the one before")
    same = [
        f"{one} and {other} are the same" for one, other in pairwise(named) if torch.equal(named[one], named[other])
    ]
    return faults + same


def token_faults(dump: Dump) -> list[str]:
    """At index 0 a row is its token's embedding: equal for equal tokens, another for another token."""
    rows = dump.hidden_states[:, dump.spec.layers.index(0)]
    ids, which = torch.unique(dump.input_ids, return_inverse=True)
    first = torch.full((len(ids),), len(which)).scatter_reduce(0, which, torch.arange(len(which)), "amin")
    faults = _counted(
        index_name(0), (rows != rows[first[which]]).any(dim=-1), "are not what the same token has elsewhere"
    )
    if not faults and len(torch.unique(rows[first].float(), dim=0)) < len(ids):
        faults.append(f"{index_name(0)}: different tokens have the same row")
    return faults


def agreement(found: Dump, expected: Dump) -> Agreement:
    """The rows of the tokens that two captures begin with together; at index 0 they must be the same bit for bit."""
    tokens = min(found.tokens, expected.tokens)
    ours, theirs = rows_of(found), rows_of(expected)
    faults: list[str] = []
    worst, identical = 0.0, True
    for name, rows in ours.items():
        errors = relative_errors(rows[:tokens], theirs[name][:tokens])
        bound = bound_of(name, found.spec.dtype)
        allowed = bound.worst if float(errors.median()) <= bound.middle else bound.middle
        if name == index_name(0):
            allowed = 0.0
        worst, identical = max(worst, float(errors.max())), identical and not bool(errors.any())
        faults += _counted(
            name, errors > allowed, f"differ (by up to {float(errors.max()):.1e}; {allowed:.0e} is allowed)"
        )
    return Agreement(faults, worst, identical)


def norm_faults(dump: Dump) -> list[str]:
    """The state after the final norm is the one before it, divided by its size, times one weight for all rows."""
    post, pre = (dump.last_hidden[LAST_HIDDEN_KEYS[kind]].double() for kind in ("post", "pre"))
    weight, scale = _fitted_norm(pre, post)
    errors = relative_errors(post, scale * weight * pre)
    faults = _counted(
        LAST_HIDDEN_KEYS["post"], errors > BOUNDS[dump.spec.dtype].middle, "are not the norm of the state before it"
    )
    sizes = (post / weight)[:, weight != 0].norm(dim=-1)
    if not faults and float(sizes.max() / sizes.min()) > _NORM_SPREAD:
        faults.append(f"{LAST_HIDDEN_KEYS['post']} is not normed: are the two last hidden states exchanged?")
    return faults


def _fitted_norm(pre: torch.Tensor, post: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` ``[H]`` and ``scale`` ``[T, 1]`` with ``post ≈ scale · weight · pre``.

    By alternating least squares; from the inverse sizes, which are right but for the norm's epsilon.
    """
    scale = pre.pow(2).mean(dim=-1, keepdim=True).rsqrt()
    weight = torch.ones_like(pre[0])
    for _ in range(4):
        scaled = scale * pre
        weight = (scaled * post).sum(dim=0) / scaled.pow(2).sum(dim=0)
        weighted = weight * pre
        scale = (weighted * post).sum(dim=-1, keepdim=True) / weighted.pow(2).sum(dim=-1, keepdim=True)
    return weight, scale


def _counted(name: str, off: torch.Tensor, words: str) -> list[str]:
    """One fault for all rows that are off, or none."""
    if not bool(off.any()):
        return []
    return [f"{name}: {int(off.sum()):,} of {len(off):,} rows {words}, first at position {int(off.int().argmax())}"]
