"""Each shape of row becomes the conversation it stands for, or is refused with what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sglang_capture.prompts import RowError, canonical

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in pairs]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": HI, "score": 1, "id": "a"}, {"messages": HI, "id": "a"}),
        ({"conversations": turns(("human", "hi"), ("gpt", "hello"))}, {"messages": HI}),
        ({"conversations": HI}, {"messages": HI}),
        (
            {"conversations": turns(("gpt", "lost"), ("human", "hi"), ("gpt", "hello")), "system": "S"},
            {"messages": [{"role": "system", "content": "S"}, *HI]},
        ),
        (
            {"conversations": turns(("system", "S"), ("gpt", "lost"), ("user", "hi"), ("chatgpt", "hello"))},
            {"messages": [{"role": "system", "content": "S"}, *HI]},
        ),
        (
            {"conversations": turns(("human", "hi"), ("function_call", '{"name": "f"}'), ("observation", "3"))},
            {
                "messages": [
                    HI[0],
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                    },
                    {"role": "tool", "content": "3"},
                ]
            },
        ),
        ({"instruction": "hi", "input": "", "output": "hello"}, {"messages": HI}),
        (
            {"instruction": "Add", "input": "1 2", "output": "", "system": "S"},
            {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Add\n\n1 2"}]},
        ),
        ({"prompt": "hi"}, {"text": "hi"}),
        ({"text": "hi", "output": "x"}, {"text": "hi"}),
        ({"input_ids": [1], "loss_mask": [1], "labels": [1]}, {"input_ids": [1], "loss_mask": [1]}),
        ({"messages": HI, "tools": '[{"name": "f"}]'}, {"messages": HI, "tools": [{"name": "f"}]}),
        ({"messages": HI, "tools": []}, {"messages": HI}),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:40],
)
def test_a_row_of_each_format(row: dict[str, Any], expected: dict[str, Any]) -> None:
    found = canonical(row)
    assert found == expected
    assert canonical(found) == found


@pytest.mark.parametrize(
    ("column", "row", "expected"),
    [
        ("messages", {"messages": HI, "prompt": "hi", "prompt_id": "x"}, {"messages": HI}),
        ("prompt", {"messages": HI, "prompt": "hi"}, {"text": "hi"}),
        ("chosen", {"chosen": HI, "rejected": HI, "messages": None}, {"messages": HI}),
        ("dialog", {"dialog": turns(("human", "hi"), ("gpt", "hello")), "text": "x"}, {"messages": HI}),
        ("story", {"story": "Once", "text": "x"}, {"text": "Once"}),
        ("tokens", {"tokens": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [1, 2], "loss_mask": [0, 1]}),
    ],
)
def test_a_named_column_is_taken_by_what_it_holds(column: str, row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert canonical(row, column) == expected


def test_what_a_table_adds_is_left_out_and_arguments_are_what_they_say() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}', "strict": None}}
    messages = [
        {"role": "user", "content": "hi", "tool_calls": None, "reasoning_content": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": []},
    ]
    assert canonical({"messages": messages})["messages"] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}],
        },
        {"role": "assistant", "content": "x"},
    ]


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": HI, "conversations": HI}, None, "both messages and conversations; name the one .* --column"),
    ({"messages": HI}, "chat", "no 'chat'; it has 'messages'"),
    ({"chat": 3}, "chat", "must hold a text, a list of messages, or token ids"),
    ({"conversations": turns(("robot", "hi"))}, None, "turn 1 is from 'robot'; expected one of"),
    ({"conversations": turns(("gpt", "hi"))}, None, "answers and no question"),
    ({"conversations": [{"from": "human", "value": 3}]}, None, "turn 1 needs a value that is text"),
    ({"conversations": turns(("human", "x"), ("function_call", "f(1)"))}, None, "turn 2 is a call"),
    ({"conversations": ["hi"]}, None, "turn 1 must look like"),
    ({"instruction": "hi", "output": ["x"]}, None, "output must be a text"),
    ({"instruction": ""}, None, "instruction must be a text that is not empty"),
    ({"messages": HI, "tools": "f"}, None, "tools must be a list"),
    ({"messages": HI, "tools": {"name": "f"}}, None, "tools must be a list"),
    ({"messages": HI, "tools": [json.loads("[" * 200 + "]" * 200)]}, None, "tools may have 64 objects and lists"),
    ({"messages": [{**HI[0], "extra": json.loads("[" * 200 + "]" * 200)}]}, None, "messages may have 64 objects"),
    ({"messages": HI, "loss_mask": [1]}, None, "loss_mask needs input_ids"),
    ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, None, "tool_calls must be a list"),
    ({"messages": [{**HI[0], "reasoning_content": "\udfff"}]}, None, "reasoning_content holds half a surrogate"),
]


@pytest.mark.parametrize(("row", "column", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_what_cannot_be_recognised_is_refused(row: dict[str, Any], column: str | None, message: str) -> None:
    with pytest.raises(RowError) as caught:
        canonical(row, column)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 400
