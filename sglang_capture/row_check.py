"""Rows that cannot be right: those that hold NaN or Inf, and those that are zero throughout.

Every complete dump is looked at once, on the writer's thread. One pass of sums at the speed of a copy finds the rows
that may be at fault (NaN and Inf survive a sum, zeros give zero); only those are looked at value by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class RowFaults:
    """The tokens of one capture that have such a row in any of its tensors."""

    def __init__(self) -> None:
        self._nonfinite: set[int] = set()
        self._zero: set[int] = set()
        self.first = ""
        """Like ``index 31, position 5``: a row with NaN or Inf; empty if there is none."""

    @property
    def nonfinite(self) -> int:
        """How many tokens have NaN or Inf."""
        return len(self._nonfinite)

    @property
    def zero(self) -> int:
        """How many tokens have a row of zeros only."""
        return len(self._zero)

    def look(self, named: Iterable[tuple[Sequence[str], torch.Tensor]], start: int = 0) -> None:
        """Look at tensors ``[n, K, H]``, K rows of each of the positions ``start, start + 1, …``, with the K names."""
        for names, rows in named:
            bad, empty = _faulty_rows(rows)
            if bad and not self.first:
                position, kind = min(bad, key=lambda place: (place[1], place[0]))
                self.first = f"{names[kind]}, position {start + position}"
            self._nonfinite.update(start + position for position, _ in bad)
            self._zero.update(start + position for position, _ in empty)


def _faulty_rows(rows: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Which rows, as ``[position, kind]``, have NaN or Inf, and which are all zeros.

    One sum over all that lies together in memory: of one kind's rows alone it is three times slower.
    """
    sums = rows.sum(dim=-1)
    suspects = (~sums.isfinite() | (sums == 0)).nonzero()
    if not len(suspects):
        return [], []
    looked_at = rows[suspects[:, 0], suspects[:, 1]]
    bad = ~looked_at.isfinite().all(dim=-1)
    empty = (looked_at == 0).all(dim=-1)
    return suspects[bad].tolist(), suspects[empty].tolist()
