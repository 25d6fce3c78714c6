"""Which rows of a prompt were captured: a set of half-open intervals."""

from __future__ import annotations


class Coverage:
    """Rows seen so far. Chunks come mostly in order, so there is mostly one interval."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        """Enter the rows ``[start, stop)``; rows entered before may come again."""
        apart = [(low, high) for low, high in self._intervals if high < start or low > stop]
        touching = [interval for interval in self._intervals if interval not in apart]
        if stop > start:
            low = min([start, *(low for low, _ in touching)])
            high = max([stop, *(high for _, high in touching)])
            apart.append((low, high))
            self._intervals = sorted(apart)

    def reaches(self, tokens: int) -> bool:
        """Whether every row of a prompt of ``tokens`` rows is there."""
        return bool(self._intervals) and self._intervals[0][0] == 0 and self._intervals[0][1] >= tokens

    def missing(self, tokens: int) -> list[tuple[int, int]]:
        """The half-open intervals that are not there."""
        gaps, position = [], 0
        for low, high in self._intervals:
            if low > position:
                gaps.append((position, low))
            position = max(position, high)
        if position < tokens:
            gaps.append((position, tokens))
        return gaps
