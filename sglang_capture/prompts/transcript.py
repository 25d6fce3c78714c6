"""A conversation while the target itself writes its answers.

The questions stay, the answers are written anew one after the other, each behind what was written before. What the
target wrote is kept as the ids that it wrote; only what the template puts between an answer and the next question is
added to them. Where the template lays an earlier answer out otherwise than it was written (templates drop the thoughts
of earlier turns), the conversation is laid out anew, as it would be in a chat, and that answer is no longer supervised:
its tokens are not those that were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_capture.prompts.chat import ChatTokenizer
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.messages import Message

_THOUGHTS_END = "</think>"


class Transcript:
    """One conversation, or bare ids, with the answers that were written so far.

    Attributes:
        ids, mask: what is laid out, and 1 for each of it that was written.
        written: the same up to the end of the last answer.
    """

    def __init__(
        self, messages: Sequence[Message], tokenizer: ChatTokenizer | None, *, tools: list[Any] | None = None
    ) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.written: tuple[list[int], list[int]] = ([], [])
        self._messages = messages
        self._tokenizer = tokenizer
        self._tools = tools
        self._text = ""
        self._history: list[Message] = []
        self._place = 0

    @classmethod
    def behind(cls, ids: list[int]) -> Transcript:
        """Of one answer behind ``ids``."""
        transcript = cls([], None)
        transcript.ids, transcript.mask = list(ids), [0] * len(ids)
        return transcript

    def advance(self) -> bool:
        """Lay the conversation out up to the next answer to be written; ``False`` if there is none.

        Raises:
            RowError: the template refuses it, or it has no place for an answer at all.
        """
        if self._tokenizer is None:
            return not any(self.mask)
        while self._place < len(self._messages) and not self._is_written_anew(self._place):
            self._history.append(self._messages[self._place])
            self._place += 1
        if self._place == len(self._messages) and self._history[-1]["role"] == "assistant":
            if not self.written[0]:
                raise RowError("there is no answer to write: a tool's result follows each of the assistant's turns")
            return False
        if not self._history:
            raise RowError("the conversation begins with an answer: there is nothing to answer")
        self._place = min(self._place + 1, len(self._messages))
        self._lay_out(self._tokenizer, self._tokenizer.render(self._history, ask=True, tools=self._tools))
        return True

    def add(self, ids: Sequence[int], end: int) -> None:
        """Put an answer at the end of what is laid out; its last ``end`` ids are not text but its end."""
        self.ids = [*self.ids, *ids]
        self.mask = [*self.mask, *([1] * len(ids))]
        self.written = (self.ids, self.mask)
        if self._tokenizer is not None:
            self._text += self._tokenizer.decode(ids)
            self._history.append(_message(self._tokenizer.decode(ids[: len(ids) - end])))

    def _is_written_anew(self, place: int) -> bool:
        """A turn whose tool was called stays: the tool's result would not fit another."""
        if self._messages[place]["role"] != "assistant":
            return False
        return place + 1 == len(self._messages) or self._messages[place + 1]["role"] != "tool"

    def _lay_out(self, tokenizer: ChatTokenizer, text: str) -> None:
        if self.ids and text.startswith(self._text):
            more = tokenizer.encode(text[len(self._text) :])
            if tokenizer.decode([*self.ids, *more]) == text:  # some tokenizers put a space before what they begin with
                self.ids, self.mask, self._text = [*self.ids, *more], [*self.mask, *([0] * len(more))], text
                return
        self.ids, self._text = tokenizer.encode(text), text
        self.mask = [0] * len(self.ids)


def _message(text: str) -> Message:
    """An answer as a chat would send it back: thoughts apart from what was said."""
    thoughts, end, said = text.rpartition(_THOUGHTS_END)
    if not end:
        return {"role": "assistant", "content": text}
    thoughts = thoughts.removeprefix("<think>").strip("\n")
    return {"role": "assistant", "reasoning_content": thoughts, "content": said.lstrip("\n")}
