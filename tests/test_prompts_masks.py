"""Every token with a character of an answer is supervised, and no other, whatever the tokenizer says of its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_capture.prompts import ChatTokenizer, RowError
from sglang_capture.tiny_tokenizer import write_tokenizer

pytest.importorskip("transformers")

Change = Callable[[dict[str, Any]], None]

SAYS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}@{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""What an assistant's turn is, stands for ``@``."""

MARKED = "{% generation %}{{ m.content }}{% endgeneration %}"


def as_it_is(tokenizer: dict[str, Any]) -> None:
    pass


def trims_offsets(tokenizer: dict[str, Any]) -> None:
    tokenizer["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def eats_white_space(tokenizer: dict[str, Any]) -> None:
    for token in tokenizer["added_tokens"]:
        token["lstrip"] = token["rstrip"] = True


def chat(tmp_path: Path, template: str, change: Change = as_it_is) -> ChatTokenizer:
    write_tokenizer(tmp_path, max_length=4096)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text(template)
    return ChatTokenizer(tmp_path)


def learned(tokenizer: ChatTokenizer, *answers: str) -> list[str]:
    """The supervised tokens of a conversation with these answers, each decoded."""
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}] for answer in answers]
    ids, mask = tokenizer.encode_messages([message for turn in turns for message in turn])
    return [tokenizer.decode([token]) for token, inside in zip(ids, mask, strict=True) if inside]


@pytest.mark.parametrize(("answer", "expected"), [("x ", ["x", " "]), (" ", [" "]), ("  \n", [" ", " ", "\n"])])
def test_spaces_of_an_answer_are_supervised_where_offsets_leave_them_out(
    tmp_path: Path, answer: str, expected: list[str]
) -> None:
    assert learned(chat(tmp_path, SAYS.replace("@", MARKED), trims_offsets), answer) == expected


def test_a_space_before_an_answer_is_not_supervised_where_offsets_leave_it_out(tmp_path: Path) -> None:
    assert learned(chat(tmp_path, SAYS.replace("@", "{{ ' ' }}" + MARKED), trims_offsets), "\nx") == ["\n", "x"]


def test_plain_text_still_gets_its_first_token_after_a_mask_was_made(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, SAYS.replace("@", MARKED))
    assert learned(tokenizer, "x") == ["x"]
    assert tokenizer.decode(tokenizer.encode_text("x")) == "<|bos|>x"


def test_a_control_token_that_eats_the_white_space_of_an_answer_is_not_supervised(tmp_path: Path) -> None:
    assert learned(chat(tmp_path, SAYS.replace("@", MARKED), eats_white_space), " x ", "y") == ["x", "y"]


@pytest.mark.parametrize("fast", [True, False])
def test_a_token_across_the_border_is_supervised_and_the_one_before_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    plain = SAYS.replace("@", "an{{ m.content }}") + "{% if add_generation_prompt %}<|assistant|>an{% endif %}"
    tokenizer = chat(tmp_path, SAYS.replace("@", "an" + MARKED) if fast else plain)
    monkeypatch.setattr(type(tokenizer._tokenizer), "is_fast", fast)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("an")] == ["an"]
    assert learned(tokenizer, "ex") == ["ne", "x"]


def test_a_python_tokenizer_that_alters_the_text_is_refused_where_a_token_is_across_the_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SAYS.replace("@", "an{{ m.content }}") + "{% if add_generation_prompt %}<|assistant|>an{% endif %}"
    tokenizer = chat(tmp_path, plain)
    monkeypatch.setattr(type(tokenizer._tokenizer), "is_fast", False)
    monkeypatch.setattr(tokenizer, "decode", lambda ids: "altered")
    ids, mask = tokenizer.encode_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}])
    assert mask == [0] * (len(ids) - 1) + [1]
    with pytest.raises(RowError, match="cannot be told"):
        tokenizer.encode_messages([{"role": "user", "content": "a"}, {"role": "assistant", "content": "ex"}])


def test_an_empty_answer_has_no_token(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, SAYS.replace("@", "t" + MARKED + "h"))
    assert "th" in [tokenizer.decode([token]) for token in tokenizer.encode("<|assistant|>th")]
    assert learned(tokenizer, "", "x") == ["x"]


@pytest.mark.parametrize(
    "turn",
    [
        "{% macro say(m) %}to:{% generation %}{{ m.content }}{% endgeneration %}.{% endmacro %}{{ say(m) }}",
        "{% set turn %}to:{% generation %}{{ m.content }}{% endgeneration %}.{% endset %}{{ turn }}",
        "{% for m in [m] recursive %}to:{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}",
        "{% filter trim %}to:   {%- generation -%}  {{ m.content }}  {%- endgeneration -%}  .{% endfilter %}",
        "to:{% generation %}{% generation %}{{ m.content }}{% endgeneration %}{% endgeneration %}.",
        "to\n  {% generation %}\n{{ m.content }}{% endgeneration %}\n.",
    ],
    ids=["macro", "set", "recursive", "filter", "nested", "lines"],
)
def test_what_is_marked_is_found_wherever_in_the_template_it_stands(tmp_path: Path, turn: str) -> None:
    assert learned(chat(tmp_path, SAYS.replace("@", turn)), "xy", "z") == ["x", "y", "z"]


def test_a_template_that_alters_what_it_has_marked_is_refused(tmp_path: Path) -> None:
    turn = "{% filter trim %}{% generation %}{{ m.content }}{% endgeneration %}{% endfilter %}"
    assert learned(chat(tmp_path, SAYS.replace("@", turn)), "x") == ["x"]
    with pytest.raises(RowError, match="no loss mask"):
        learned(chat(tmp_path, SAYS.replace("@", turn)), " x")


def test_a_text_may_have_the_characters_that_the_marks_are_made_of(tmp_path: Path) -> None:
    assert "".join(learned(chat(tmp_path, SAYS.replace("@", MARKED)), "\ufdd1", "x")).endswith("x")
