"""What the target wrote is kept as it wrote it, and only that is supervised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import EMPTIES_THOUGHTS, FORGETS_THOUGHTS, OPENS_A_THOUGHT, PLAIN

from sglang_capture.prompts import ChatTokenizer, RowError
from sglang_capture.prompts.lengths import runs
from sglang_capture.prompts.transcript import Transcript
from sglang_capture.tiny_tokenizer import EOS, write_tokenizer

pytest.importorskip("transformers")

Make = Callable[[str], ChatTokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make_with_template(template: str) -> ChatTokenizer:
        write_tokenizer(tmp_path, max_length=4096)
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatTokenizer(tmp_path)

    return make_with_template


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def old(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def spelled(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """A text as a model may write it: letter by letter, not as the tokenizer would."""
    return [token for letter in text for token in tokenizer.encode(letter)]


def write(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], answers: list[str]) -> tuple[list[str], Transcript]:
    """The prompts of a conversation, as text, whose answers are these; each ends with its own end token."""
    transcript, prompts = Transcript(messages, tokenizer), []
    remaining = iter(answers)
    while transcript.advance():
        prompts.append(tokenizer.decode(transcript.ids))
        assert len(transcript.ids) == len(transcript.mask)
        transcript.add([*spelled(tokenizer, next(remaining)), EOS], 1)
    assert next(remaining, None) is None
    return prompts, transcript


def supervised(tokenizer: ChatTokenizer, transcript: Transcript) -> list[str]:
    ids, mask = transcript.written
    return [tokenizer.decode(ids[start:stop]) for start, stop in runs(mask)]


CHAT = [user("hi"), old("x"), user("more?"), old("y"), user("bye")]


def test_every_answer_is_written_anew_and_one_more_where_it_is_waited_for(make: Make) -> None:
    tokenizer = make(PLAIN)
    prompts, transcript = write(tokenizer, CHAT, ["hello there", "no", "bye"])
    assert prompts == [
        "<|bos|><|user|>hi<|assistant|>",
        "<|bos|><|user|>hi<|assistant|>hello there<|eos|><|user|>more?<|assistant|>",
        "<|bos|><|user|>hi<|assistant|>hello there<|eos|><|user|>more?<|assistant|>no<|eos|><|user|>bye<|assistant|>",
    ]
    assert supervised(tokenizer, transcript) == ["hello there<|eos|>", "no<|eos|>", "bye<|eos|>"]


def test_the_ids_that_were_written_stay_though_the_tokenizer_would_make_others(make: Make) -> None:
    tokenizer = make(PLAIN)
    _, transcript = write(tokenizer, CHAT[:3], ["the the", "no"])
    ids, mask = transcript.written
    (start, stop), _ = runs(mask)
    assert ids[start:stop] == [*spelled(tokenizer, "the the"), EOS] != [*tokenizer.encode("the the"), EOS]


@pytest.mark.parametrize(
    ("template", "thought"),
    [
        (FORGETS_THOUGHTS, "<think>\nA\n</think>\n\n"),
        (OPENS_A_THOUGHT, "A\n</think>"),
        (EMPTIES_THOUGHTS, "<think>A</think>"),
    ],
    ids=["forgets", "opens", "empties"],
)
def test_where_thoughts_are_dropped_only_the_answers_since_are_supervised(
    make: Make, template: str, thought: str
) -> None:
    tokenizer = make(template)
    prompts, transcript = write(tokenizer, CHAT[:3], [f"{thought}hello", f"{thought}no"])
    assert "hello" in prompts[1] and "A" not in prompts[1]
    assert supervised(tokenizer, transcript) == [f"{thought}no<|eos|>"]
    fresh = [CHAT[0], old("hello"), CHAT[2]]
    assert prompts[1] == tokenizer.render(fresh, ask=True)


def test_a_turn_whose_tool_was_called_stays(make: Make) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [user("sum"), old("", tool_calls=[call]), {"role": "tool", "content": "3"}, old("x")]
    tokenizer = make(FORGETS_THOUGHTS)
    prompts, transcript = write(tokenizer, messages, ["It is 3."])
    assert "<tool_call>add {}</tool_call>" in prompts[0] and "<tool_response>3" in prompts[0]
    assert supervised(tokenizer, transcript) == ["It is 3.<|eos|>"]


def test_bare_ids_get_one_answer() -> None:
    transcript = Transcript.behind([5, 6])
    assert transcript.advance()
    transcript.add([7, 8], 0)
    assert transcript.written == ([5, 6, 7, 8], [0, 0, 1, 1])
    assert not transcript.advance()


def test_where_there_is_nothing_to_answer_the_row_is_refused(make: Make) -> None:
    with pytest.raises(RowError, match="nothing to answer"):
        Transcript([old("x")], make(PLAIN)).advance()
