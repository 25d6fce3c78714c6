"""The mask covers what assistants wrote, with templates that forget, open or empty thoughts, and with tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    CLOSES_A_THOUGHT,
    EMPTIES_THOUGHTS,
    FORGETS_THOUGHTS,
    OPENS_A_THOUGHT,
    PLAIN,
    WITHOUT_ENDS,
    WITHOUT_HEADERS,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_capture.prompts import ChatTokenizer, RowError
from sglang_capture.prompts.lengths import runs
from sglang_capture.prompts.messages import tidy_messages
from sglang_capture.tiny_tokenizer import write_tokenizer

pytest.importorskip("transformers")

Make = Callable[[str], ChatTokenizer]


def tokenizer_with(directory: Path, template: str) -> ChatTokenizer:
    write_tokenizer(directory, max_length=4096)
    (directory / "chat_template.jinja").write_text(template)
    return ChatTokenizer(directory)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda template: tokenizer_with(tmp_path, template)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, thought: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def calls(name: str, thought: str | None = None) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": '{"x": 1}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": thought}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "1"}


def supervised(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    ids, mask = tokenizer.encode_messages(tidy_messages(messages), **options)
    assert mask is not None and len(mask) == len(ids)
    return [tokenizer.decode(ids[start:stop]) for start, stop in runs(mask)]


CHAT = [{"role": "system", "content": "Be short."}, user("hi"), says("hello", "A"), user("more?"), says("no", "B")]
TOOLS = [user("sum"), calls("add", "A"), result("3"), says("It is 3.", "B"), user("thanks"), says("Bye.", "C")]
LOOP = TOOLS[:4]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (FORGETS_THOUGHTS, CHAT, ["hello<|eos|>\n", "<think>\nB\n</think>\n\nno<|eos|>\n"]),
        (
            FORGETS_THOUGHTS,
            LOOP,
            [
                '<think>\nA\n</think>\n\n<tool_call>add {"x": 1}</tool_call><|eos|>\n',
                "<think>\nB\n</think>\n\nIt is 3.<|eos|>\n",
            ],
        ),
        (
            FORGETS_THOUGHTS,
            TOOLS,
            [
                '<tool_call>add {"x": 1}</tool_call><|eos|>\n',
                "It is 3.<|eos|>\n",
                "<think>\nC\n</think>\n\nBye.<|eos|>\n",
            ],
        ),
        (OPENS_A_THOUGHT, CHAT, ["hello<|eos|>", "no<|eos|>"]),
        (OPENS_A_THOUGHT, [user("hi"), says("<think>\nhm\n</think><b>hello")], ["<b>hello<|eos|>"]),
        (CLOSES_A_THOUGHT, CHAT, ["</think>hello<|eos|>", "</think>no<|eos|>"]),
        (EMPTIES_THOUGHTS, CHAT, ["<think></think>hello<|eos|>", "<think></think>no<|eos|>"]),
        (
            EMPTIES_THOUGHTS,
            TOOLS,
            [
                '<think></think>(call add {"x": 1})<|eos|>',
                "<think></think>It is 3.<|eos|>",
                "<think></think>Bye.<|eos|>",
            ],
        ),
        (EMPTIES_THOUGHTS, TOOLS[:3], ['<think>A</think>(call add {"x": 1})<|eos|>']),
        (WITHOUT_ENDS, CHAT, ["<think></think>hello", "<think>B</think>no"]),
        (
            WITHOUT_ENDS,
            TOOLS,
            ["<think></think>(call add)", "<think></think>It is 3.", "<think>C</think>Bye."],
        ),
        (WITHOUT_HEADERS, CHAT[1:], [" hello<|eos|>", " no<|eos|>"]),
    ],
    ids=[
        "chat",
        "loop",
        "loop and chat",
        "opened",
        "opened, own",
        "closed",
        "emptied",
        "emptied loop",
        "waiting",
        "no end",
        "no end, tools",
        "no header",
    ],
)
def test_every_answer_is_supervised_as_the_template_shows_it(
    make: Make, template: str, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    assert supervised(make(template), messages) == expected


def test_tools_reach_the_template_and_are_not_supervised(make: Make) -> None:
    tokenizer = make(FORGETS_THOUGHTS)
    tools = [{"type": "function", "function": {"name": "add"}}]
    ids, mask = tokenizer.encode_messages(tidy_messages(LOOP), tools=tools)
    assert tokenizer.decode(ids).startswith("<|system|>You have add <|eos|>")
    assert mask is not None and not any(mask[:5])
    assert supervised(tokenizer, LOOP, tools=tools) == supervised(tokenizer, LOOP)


def test_a_question_that_looks_like_an_answer_is_never_supervised(make: Make) -> None:
    """Where turns must be counted, a header too many is noticed."""
    messages = [user("sum<|assistant|>\n"), *TOOLS[1:]]
    with pytest.raises(RowError, match="no loss mask"):
        supervised(make(FORGETS_THOUGHTS), messages)


def test_a_header_too_many_and_one_too_few_are_noticed_too(make: Make) -> None:
    """The same number of headers as of turns, and still not the turns': then a turn lacks its text."""
    silent = FORGETS_THOUGHTS.replace(
        "<|assistant|>\n{% if loop", "{% if m.content != 'Bye.' %}<|assistant|>\n{% endif %}{% if loop", 1
    )
    messages = [user("sum<|assistant|>\n"), *TOOLS[1:]]
    with pytest.raises(RowError, match="no loss mask"):
        supervised(make(silent), messages)


def test_a_header_that_is_asked_for_otherwise_than_it_stands_there_is_not_taken_for_an_answer(make: Make) -> None:
    """Only white space is common to both: where the answer begins, cannot be told."""
    spaced = PLAIN.replace("<|{{ m.role }}|>", " <|{{ m.role }}|> ")
    template = spaced.replace("<|assistant|>{% endif", "  <|assistant|>{% endif")
    with pytest.raises(RowError, match="no loss mask"):
        supervised(make(template), CHAT)


def test_an_answer_before_any_question_is_told_by_its_header_alone(make: Make) -> None:
    assert supervised(make(PLAIN), [says("hello"), user("hi"), says("no")]) == ["hello<|eos|>", "no<|eos|>"]
    with pytest.raises(RowError, match="message 1, an assistant's turn, cannot be found"):
        supervised(make(WITHOUT_HEADERS), [says("hello")])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.none() | TEXTS), min_size=1, max_size=4), st.sampled_from(range(4)))
def test_nothing_of_a_question_is_ever_supervised(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str, str | None]], which: int
) -> None:
    template = (PLAIN, FORGETS_THOUGHTS, OPENS_A_THOUGHT, EMPTIES_THOUGHTS)[which]
    tokenizer = tokenizer_with(tmp_path_factory.getbasetemp(), template)
    messages = [m for question, answer, thought in turns for m in (user(question), says(answer, thought))]
    found = supervised(tokenizer, messages)
    assert len(found) == len(turns)
    for run, (_, answer, _) in zip(found, turns, strict=True):
        assert answer in run and run.count("<|eos|>") == 1 and "<|user|>" not in run
