"""Where in a rendered conversation the assistants' turns stand.

Most chat templates do not say what the assistant wrote. It is found by rendering: a turn starts where the conversation
before it, with the prompt for an answer, ends. Two habits of templates for models that think are provided for:

- the prompt for an answer holds more than an earlier turn begins with (``<think>``): the turn starts behind what both
  have;
- earlier thoughts are dropped once there is a later question, so that the conversation before a turn is laid out
  differently when the turn is there: the turns are then counted by what they begin with, and each must hold its text.

Where neither tells, the row is refused: a wrong mask would train a draft on what users say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.messages import Message

Span = tuple[int, int]
"""First character, and the one after the last."""

Render = Callable[[Sequence[Message], bool], str]
"""Messages, and whether an answer is asked for, as the template lays them out."""

_SENTINEL = "␞"
"""An answer that shares no beginning with what a template puts before answers."""


@dataclass(frozen=True)
class TurnMarks:
    """What a template puts before an answer that is there (``<|im_start|>assistant``) and behind it (``<|im_end|>``);
    empty where that cannot be told."""

    header: str
    end: str


def turn_marks(render: Render) -> TurnMarks:
    """The marks of a template, seen on the shortest conversation."""
    question = [{"role": "user", "content": "a"}]
    try:
        asked, unasked = render(question, True), render(question, False)
        first, second = (render([*question, _answer(text)], False) for text in ("b", "c"))
        shown = render([*question, _answer(_SENTINEL)], False)
    except RowError:
        return TurnMarks("", "")
    begin = common_prefix(unasked, shown)
    header = _whole_tags(shown[begin : common_prefix(asked, shown)])
    return TurnMarks(header, first[len(first) - common_prefix(first[::-1], second[::-1]) :])


def find_turns(messages: Sequence[Message], text: str, render: Render, marks: TurnMarks) -> list[Span]:
    """Where in ``text``, all of ``messages`` rendered, each assistant's turn stands, its end token included.

    Raises:
        RowError: it cannot be told.
    """
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [_start(messages, place, text, render) for place in answers]
    counted = None in starts
    if counted:
        starts = list(_counted_starts(messages, text, marks))
    if len(starts) != len(answers):
        raise undetermined(answers[0])
    spans = []
    for place, start in zip(answers, starts, strict=True):
        stop = None if start is None else _stop(messages, place, text, start, render, marks)
        if start is None or stop is None or (counted and not _holds(text[start:stop], messages[place])):
            raise undetermined(place)
        spans.append((start, stop))
    if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
        raise undetermined(None)
    return spans


def undetermined(place: int | None) -> RowError:
    """The refusal of a conversation, for the sake of the message at ``place`` or of all."""
    where = "the assistants' turns" if place is None else f"message {place + 1}, an assistant's turn,"
    return RowError(
        f"{where} cannot be found in what the chat template makes of the conversation, so there is no loss mask; "
        "use a template with {% generation %} around the assistant's text, or send input_ids with a loss_mask"
    )


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items both begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _start(messages: Sequence[Message], place: int, text: str, render: Render) -> int | None:
    if place == 0:
        return None
    before = render(messages[:place], True)
    if text.startswith(before):
        return len(before)
    unasked = render(messages[:place], False)
    start = common_prefix(before, render([*messages[:place], _answer(_SENTINEL)], False))
    header = _whole_tags(before[len(unasked) : start]) if before.startswith(unasked) else ""
    start = len(unasked) + len(header)
    return start if header.strip() and text.startswith(before[:start]) else None


def _whole_tags(header: str) -> str:
    """Without the beginning of a tag that is all that ``<think>`` and ``</think>`` have in common."""
    return header[: header.rfind("<")] if header.rfind("<") > header.rfind(">") else header


def _counted_starts(messages: Sequence[Message], text: str, marks: TurnMarks) -> list[int]:
    """The ends of all headers, if there are as many as turns (and one at the end, where an answer is asked for)."""
    if not marks.header.strip():
        return []
    found = [match.end() for match in re.finditer(re.escape(marks.header), text)]
    if messages[-1]["role"] != "assistant":
        found = found[:-1]
    return found


def _stop(
    messages: Sequence[Message], place: int, text: str, start: int, render: Render, marks: TurnMarks
) -> int | None:
    """A template may lay out the last turn differently from earlier ones; then the end token is looked for, and where
    there is none, what the next message begins with."""
    through = render(messages[: place + 1], False)
    if text.startswith(through) and len(through) > start:
        return len(through)
    if not marks.end.strip():
        return _next_start(messages, place, text, render)
    found = text.find(marks.end, start)
    return None if found < 0 else found + len(marks.end)


def _next_start(messages: Sequence[Message], place: int, text: str, render: Render) -> int | None:
    """Where the message behind the one at ``place`` begins: where it makes a difference, less its own header."""
    if place + 1 == len(messages) or messages[place + 1]["role"] == "assistant":
        return None
    altered = {**messages[place + 1], "content": _SENTINEL}
    question, answer = {"role": "user", "content": "a"}, _answer("b")
    alone, followed = render([question, answer], False), render([question, answer, altered], False)
    header = followed[len(alone) : max(followed.find(_SENTINEL), 0)] if followed.startswith(alone) else ""
    differs = common_prefix(text, render([*messages[: place + 1], altered, *messages[place + 2 :]], False))
    return differs - len(header) if header.strip() and text[:differs].endswith(header) else None


def _holds(turn: str, message: Message) -> bool:
    """Whether a turn has the message's text; thoughts at its beginning may have been dropped."""
    content = message.get("content")
    return not isinstance(content, str) or content.rpartition("</think>")[2].strip() in turn
