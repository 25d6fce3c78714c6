"""Cutting a conversation to a length, and what is learned from it, without cutting an answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from sglang_capture.prompts.errors import TooLong


@dataclass(frozen=True)
class Layout:
    """What of a conversation is captured, and what of it is learned.

    Attributes:
        max_length: most tokens; a longer conversation ends with the last answer that is in it as a whole.
        only_last_turn: only the last answer is supervised.
    """

    max_length: int | None = None
    only_last_turn: bool = False


def runs(mask: list[int]) -> list[tuple[int, int]]:
    """The runs of ones, first position and the one after the last: the answers."""
    found, place = [], 0
    for value, run in groupby(mask):
        length = sum(1 for _ in run)
        if value:
            found.append((place, place + length))
        place += length
    return found


def lay_out(ids: list[int], mask: list[int] | None, layout: Layout) -> tuple[list[int], list[int] | None]:
    """Ids and mask (0 or 1 for each id), cut and masked as ``layout`` says.

    Raises:
        TooLong: no whole answer is within the length, or nothing says where answers end.
    """
    if layout.max_length is not None and len(ids) > layout.max_length:
        length = _cut(len(ids), mask, layout.max_length)
        ids, mask = ids[:length], None if mask is None else mask[:length]
    if layout.only_last_turn and mask is not None and (found := runs(mask)):
        start, stop = found[-1]
        mask = [int(start <= place < stop) for place in range(len(mask))]
    return ids, mask


def _cut(tokens: int, mask: list[int] | None, most: int) -> int:
    """The end of the last answer that is within ``most`` tokens."""
    answers = [] if mask is None else runs(mask)
    whole = [stop for _, stop in answers if stop <= most]
    if whole:
        return whole[-1]
    if not answers:
        raise TooLong(f"{tokens} tokens without an answer at whose end it could be cut; --max-length is {most}")
    raise TooLong(f"its first answer ends after {answers[0][1]} tokens, and --max-length is {most}")
