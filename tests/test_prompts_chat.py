"""The mask covers what assistants wrote, whatever template says so; where that cannot be told, no mask is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_capture.errors import CaptureError
from sglang_capture.prompts import ChatTokenizer, RowError, parse_row
from sglang_capture.tiny_tokenizer import BOS, write_tokenizer

pytest.importorskip("transformers")

Make = Callable[[str], ChatTokenizer]

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " hello  there\n"},
    {"role": "user", "content": "more?"},
    {"role": "assistant", "content": "ناعم — 🙂"},
]

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{%- generation -%}{{ m.content + eos_token }}{%- endgeneration -%}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Qwen3's: the last answer is preceded by a thought, the earlier ones have lost theirs.
FORGETFUL = PLAIN.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_with_template(template: str) -> ChatTokenizer:
        write_tokenizer(tmp_path, max_length=4096)
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatTokenizer(tmp_path)

    return make_with_template


def supervised(tokenizer: ChatTokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """The runs of supervised tokens, decoded."""
    ids, mask = tokenizer.encode_messages(messages)
    assert mask is not None and len(mask) == len(ids)
    runs: list[list[int]] = []
    for position, (token, inside) in enumerate(zip(ids, mask, strict=True)):
        if inside and (position == 0 or not mask[position - 1]):
            runs.append([])
        if inside:
            runs[-1].append(token)
    return [tokenizer._tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "generation"])
def test_every_answer_is_supervised_with_its_end_and_nothing_else(make: Make, template: str) -> None:
    assert supervised(make(template), CONVERSATION) == [" hello  there\n<|eos|>", "ناعم — 🙂<|eos|>"]


def test_both_ways_to_the_mask_agree(make: Make) -> None:
    assert make(PLAIN).encode_messages(CONVERSATION) == make(MARKED).encode_messages(CONVERSATION)


def test_a_tokenizer_without_character_offsets_gives_the_same_mask(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make(MARKED).encode_messages(CONVERSATION)
    tokenizer = make(MARKED)
    monkeypatch.setattr(type(tokenizer._tokenizer), "is_fast", False)
    assert tokenizer.encode_messages(CONVERSATION) == expected


def test_earlier_answers_may_be_laid_out_differently_from_the_last(make: Make) -> None:
    assert supervised(make(FORGETFUL), CONVERSATION) == [
        " hello  there\n<|eos|>",
        "<think></think>ناعم — 🙂<|eos|>",
    ]


def test_there_is_one_bos(make: Make) -> None:
    ids, _ = make(PLAIN).encode_messages(CONVERSATION)
    assert ids[0] == BOS and ids.count(BOS) == 1


def test_a_conversation_that_waits_for_an_answer_asks_for_it(make: Make) -> None:
    tokenizer = make(PLAIN)
    ids, mask = tokenizer.encode_messages(CONVERSATION[:2])
    assert mask == [0] * len(ids)  # nothing of it is an answer: to learn it would be to learn what users ask
    assert tokenizer._tokenizer.decode(ids).endswith("hi<|assistant|>")
    assert supervised(tokenizer, CONVERSATION[:4]) == [" hello  there\n<|eos|>"]


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("{% endfor %}", "{% endfor %}<|{{ messages | length }}|>"),
        MARKED.replace(
            "{%- generation -%}", "{% if false %}{%- generation -%}x{%- endgeneration -%}{% endif %}"
        ).replace("}{%- endgeneration -%}", "}"),
        FORGETFUL.replace("{{ eos_token }}", "\n"),
    ],
    ids=["counts messages", "marks nothing", "no end of turn"],
)
def test_where_the_answers_cannot_be_found_the_row_is_refused(make: Make, template: str) -> None:
    with pytest.raises(RowError, match="no loss mask"):
        make(template).encode_messages(CONVERSATION)


def test_what_the_template_says_reaches_the_user(make: Make) -> None:
    tokenizer = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowError, match="refuses these messages: roles must alternate"):
        tokenizer.encode_messages(CONVERSATION[:2])


def test_a_row_of_messages_becomes_ids(make: Make) -> None:
    tokenizer = make(PLAIN)
    prompt = parse_row({"id": "c", "messages": CONVERSATION}, tokenizer)
    assert (prompt.input_ids, prompt.loss_mask) == tokenizer.encode_messages(CONVERSATION)
    assert prompt.digest == parse_row({"input_ids": prompt.input_ids}, None).digest


def test_text_becomes_the_ids_that_the_engine_makes_of_it(make: Make) -> None:
    assert len(make(PLAIN).encode_text("hi")) == 2  # the engine puts <|bos|> before plain text


def test_a_tokenizer_without_a_template_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_length=4096)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CaptureError, match="has no chat template"):
        ChatTokenizer(tmp_path).encode_messages(CONVERSATION)


def test_a_path_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"no tokenizer could be loaded from .*--tokenizer"):
        ChatTokenizer(tmp_path).load()


def test_without_transformers_the_error_says_what_to_install(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(CaptureError, match=r"pip install 'sglang-capture\[transformers\]'"):
        make(PLAIN).load()
