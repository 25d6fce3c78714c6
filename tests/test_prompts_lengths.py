"""A conversation is cut at an answer's end or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_capture.prompts import Layout, TooLong, parse_row
from sglang_capture.prompts.lengths import lay_out, runs

MASK = [0, 0, 1, 1, 0, 1, 0]
IDS = list(range(7))


@pytest.mark.parametrize(
    ("most", "length"), [(7, 7), (6, 6), (5, 4), (4, 4)], ids=["fits", "behind the last", "between", "at the end"]
)
def test_it_ends_with_the_last_answer_that_is_whole(most: int, length: int) -> None:
    assert lay_out(IDS, MASK, Layout(most)) == (IDS[:length], MASK[:length])


@pytest.mark.parametrize(
    ("mask", "reason"), [(MASK, "first answer ends after 4 tokens"), (None, "without an answer at whose end")]
)
def test_what_has_no_whole_answer_is_left_out(mask: list[int] | None, reason: str) -> None:
    with pytest.raises(TooLong, match=reason):
        lay_out(IDS, mask, Layout(3))


def test_only_the_last_answer_is_supervised_of_what_is_left() -> None:
    assert lay_out(IDS, MASK, Layout(None, True))[1] == [0, 0, 0, 0, 0, 1, 0]
    assert lay_out(IDS, MASK, Layout(5, True)) == ([0, 1, 2, 3], [0, 0, 1, 1])


@given(st.lists(st.integers(0, 1), min_size=1), st.integers(1, 40))
def test_no_answer_is_ever_cut(mask: list[int], most: int) -> None:
    ids = list(range(len(mask)))
    try:
        kept, kept_mask = lay_out(ids, mask, Layout(most))
    except TooLong:
        assert len(mask) > most and not any(stop <= most for _, stop in runs(mask))
        return
    assert kept_mask is not None and len(kept) == len(kept_mask) <= max(most, 1)
    assert runs(kept_mask) == [run for run in runs(mask) if run[1] <= len(kept)]
    assert len(kept) == len(mask) or kept_mask[-1] == 1


def test_a_row_says_how_long_it_was() -> None:
    def parse(**row: Any) -> Any:
        return parse_row(row, None, Layout(5))

    prompt = parse(input_ids=IDS, loss_mask=MASK)
    assert (prompt.input_ids, prompt.metadata) == ([0, 1, 2, 3], {"cut_from_tokens": 7})
    assert parse(input_ids=[1, 2], loss_mask=[0, 1]).metadata == {}
