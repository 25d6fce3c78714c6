"""A row either becomes exactly the prompt it stands for, or is refused with a message that says what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_capture.mark import is_capture_id
from sglang_capture.prompts import Prompt, RowError, check_vocabulary, parse_row


def parse(**row: Any) -> Prompt:
    return parse_row(row, None)


def test_input_ids_are_sent_as_they_are_with_their_mask() -> None:
    prompt = parse(id="a", input_ids=[5, 6, 7], loss_mask=[0, 1, 1], metadata={"source": "x"})
    assert prompt.capture_id == "a"
    assert (prompt.input_ids, prompt.text, prompt.loss_mask) == ([5, 6, 7], None, [0, 1, 1])
    assert prompt.metadata == {"source": "x"}


@pytest.mark.parametrize("key", ["prompt", "text"])
def test_prompt_and_text_mean_the_same(key: str) -> None:
    prompt = parse(**{key: "Hello"})
    assert (prompt.text, prompt.input_ids, prompt.loss_mask) == ("Hello", None, None)
    assert prompt.digest == parse(text="Hello").digest


def test_keys_that_are_not_ours_are_left_alone() -> None:
    assert parse(text="x", score=3, conversations=None, tools=[{"name": "f"}], output="y") == parse(text="x")


def test_a_null_stands_for_a_key_that_is_not_there() -> None:
    assert parse(text="x", input_ids=None, messages=None, id=None, metadata=None) == parse(text="x")


def test_without_an_id_the_content_names_the_capture() -> None:
    one, again, other = parse(text="x"), parse(text="x", metadata={"k": 1}), parse(text="y")
    assert one.capture_id == f"r-{one.digest}" == again.capture_id
    assert one.capture_id != other.capture_id


def test_a_prompt_knows_whether_its_row_gave_it_an_id() -> None:
    assert parse(id="a", text="x").named and parse(id="a/b", text="x").named
    assert not parse(text="x").named


def test_ids_and_text_never_share_a_digest() -> None:
    assert parse(text="a" * 8).digest != parse(input_ids=[int.from_bytes(b"aaaa", "little")]).digest


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_digests_agree_exactly_when_the_ids_do(first: list[int], second: list[int]) -> None:
    assert (parse(input_ids=first).digest == parse(input_ids=second).digest) == (first == second)


@given(st.text())
def test_any_id_becomes_a_capture_id_and_is_not_lost(name: str) -> None:
    prompt = parse(id=name, text="x")
    assert is_capture_id(prompt.capture_id)
    assert name in (prompt.capture_id, prompt.metadata.get("id"))


def test_ids_that_look_alike_as_slugs_stay_apart() -> None:
    assert len({parse(id=name, text="x").capture_id for name in ("a/b", "a b", "a//b", "../a-b")}) == 4


def test_a_whole_number_is_an_id() -> None:
    assert parse(id=17, text="x").capture_id == "17"


def test_the_metadata_keeps_its_own_id_over_the_rows() -> None:
    assert parse(id="a/b", text="x", metadata={"id": "mine"}).metadata == {"id": "mine"}


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of messages, conversations, .* found only an empty object"),
    ({"chosen": []}, "found only 'chosen'"),
    ({"text": "x", "input_ids": [1]}, "found both text and input_ids; name the one that is meant with --column"),
    ({"prompt": "x", "text": "x"}, "found both prompt and text"),
    ({"text": ""}, "not empty"),
    ({"text": 3}, "text must be a text that is not empty; found 3"),
    ({"text": "a\ud800"}, "half a surrogate pair at character 1"),
    ({"input_ids": []}, "one or more token ids"),
    ({"input_ids": "1 2"}, "a list of one or more"),
    ({"input_ids": [1, -2]}, "found -2 at position 1"),
    ({"input_ids": [1, 2.0]}, "found 2.0 at position 1"),
    ({"input_ids": [True]}, "found True"),
    ({"input_ids": [2**63]}, "whole numbers"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "1 entries for 2 input_ids"),
    ({"input_ids": [1], "loss_mask": [2]}, "list of 0 and 1"),
    ({"input_ids": [1], "loss_mask": [[0]]}, "list of 0 and 1"),
    ({"input_ids": [1], "loss_mask": "1"}, "list of 0 and 1"),
    ({"text": "x", "loss_mask": [1]}, "needs input_ids"),
    ({"text": "x", "metadata": [1]}, "metadata must be an object"),
    ({"text": "x", "metadata": {"zero_rows": 0}}, "metadata may not say zero_rows"),
    ({"text": "x", "metadata": {"score": float("nan")}}, "metadata holds what JSON cannot"),
    ({"text": "x", "metadata": {"note": "\udc00"}}, "metadata holds what JSON cannot"),
    ({"text": "x", "id": 1.5}, "text or a whole number"),
    ({"text": "x", "id": True}, "text or a whole number"),
    ({"text": "x", "id": "a", "capture_id": "b"}, "must agree"),
    ({"messages": []}, "one or more messages"),
    ({"messages": "hello"}, "one or more messages"),
    ({"messages": ["hello"]}, "message 1 must look like"),
    ({"messages": [{"from": "human", "value": "x"}]}, "message 1 must look like"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "message 2 needs a content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "message 1 holds half a surrogate pair"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]}, "a part that is no text"),
    ({"messages": [{"role": "user", "content": "x"}]}, "need the model's tokenizer"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[repr(row)[:50] for row, _ in BAD_ROWS])
def test_a_malformed_row_is_refused_with_the_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(row, None)
    assert re.search(message, str(caught.value))
    assert len(str(caught.value)) < 400


def test_ids_outside_the_vocabulary_are_caught_and_named() -> None:
    prompt = parse(input_ids=[0, 511, 512, 9000])
    check_vocabulary(prompt, 9001)
    with pytest.raises(RowError, match="token id 512 at position 2 is outside the vocabulary of 512"):
        check_vocabulary(prompt, 512)
    check_vocabulary(parse(text="x"), 1)
