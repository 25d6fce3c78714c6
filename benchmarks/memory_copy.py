"""The limit: copying the bytes to memory whose pages are there already. No file comes of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.common import Rows


def copier(rows: Rows) -> Callable[[int], None]:
    target = torch.zeros(len(rows.layers) + 1, *rows.last.shape, dtype=rows.last.dtype)

    def copy(_: int) -> None:
        for place, state in zip(target, (*rows.layers, rows.last), strict=True):
            place.copy_(state)

    return copy


def batch_copier(rows: Rows, prompts: int) -> Callable[[int], None]:
    """To a place for each of several prompts, as their dumps have: no cache holds them all."""
    copies = [copier(rows) for _ in range(prompts)]

    def copy(number: int) -> None:
        for each in copies:
            each(number)

    return copy


def epoch(rows: Rows, samples: int) -> Callable[[], list[list[torch.Tensor]]]:
    """Samples in memory, each in pages of its own."""
    states = [[torch.stack(rows.layers, dim=1), rows.last.clone()] for _ in range(samples)]
    return lambda: states
