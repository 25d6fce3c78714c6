"""A conversation as the model reads it, and which of its tokens the model wrote.

The layout is the model's own chat template. The loss mask marks what an assistant wrote, the token that ends its turn
included. Templates that mark it themselves (``{% generation %}``) are believed; most do not, and then the turns are
found by rendering: a turn starts where the conversation before it, with the prompt for an answer, ends. Where neither
tells, the row is refused: a wrong mask would train a draft on what users say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from sglang_capture.errors import CaptureError
from sglang_capture.prompts.errors import RowError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, Any]
Span = tuple[int, int]
"""First character, and the one after the last."""


class ChatTokenizer:
    """A model's tokenizer with its chat template, loaded when it is first needed.

    Not for several threads at once: tokenizers of the ``tokenizers`` library may not be shared.

    Args:
        path: a directory, or a name on the Hugging Face Hub, as transformers takes it.
        trust_remote_code: run the Python code that comes with the tokenizer (Kimi's needs it).
    """

    def __init__(self, path: str | Path, *, trust_remote_code: bool = False) -> None:
        self.path = str(path)
        self.trust_remote_code = trust_remote_code

    def load(self) -> None:
        """Load it now.

        Raises:
            CaptureError: transformers is not installed, or cannot load the tokenizer; the message says what to do.
        """
        _ = self._tokenizer

    def encode_messages(self, messages: Sequence[Message]) -> tuple[list[int], list[int] | None]:
        """The ids of a conversation, and 1 for each that an assistant wrote (``None`` if no assistant speaks).

        A conversation that does not end with an assistant's turn gets the prompt for one appended, as the engine's
        chat route would do.

        Raises:
            RowError: the template refuses the conversation, or it cannot be told which tokens an assistant wrote.
            CaptureError: as :meth:`load`.
        """
        ask = messages[-1]["role"] != "assistant"
        if all(message["role"] != "assistant" for message in messages):
            return self._encode(self._render(messages, ask)), None
        if self._marks_generation:
            return self._encode_marked(messages, ask)
        text = self._render(messages, ask)
        spans = self._turns(messages, text)
        return self._encode_spans(text, spans)

    def count_text(self, text: str) -> int:
        """How many tokens the engine makes of plain text, special tokens included.

        Raises:
            CaptureError: as :meth:`load`.
        """
        return len(self._tokenizer(text)["input_ids"])

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise CaptureError(
                "laying out messages needs transformers: pip install 'sglang-capture[transformers]', "
                "or send rows with input_ids or text"
            ) from None
        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # the loaders of the many tokenizers raise whatever they like
            hint = (
                "it brings its own code: allow that with --trust-remote-code if you trust it"
                if "trust_remote_code" in str(error)
                else "name the directory or the Hub name of the model's tokenizer with --tokenizer"
            )
            raise CaptureError(
                f"no tokenizer could be loaded from {self.path}: {_first_line(error)}; {hint}"
            ) from error

    @cached_property
    def _template(self) -> str:
        try:
            return cast(str, self._tokenizer.get_chat_template())
        except ValueError as error:
            raise CaptureError(
                f"the tokenizer {self.path} has no chat template to lay out messages with: "
                "send rows with text or input_ids"
            ) from error

    @property
    def _marks_generation(self) -> bool:
        """Only tokenizers of the ``tokenizers`` library know which characters a token covers."""
        return _GENERATION.search(self._template) is not None and bool(self._tokenizer.is_fast)

    @cached_property
    def _turn_end(self) -> str:
        """What the template puts behind an answer (``<|im_end|>``): what two renderings with other answers share."""
        question = {"role": "user", "content": "a"}
        first, second = (
            self._render([question, {"role": "assistant", "content": answer}], False) for answer in ("b", "c")
        )
        return first[len(first) - _common_prefix(first[::-1], second[::-1]) :]

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        try:
            return cast(
                str,
                self._tokenizer.apply_chat_template(
                    list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=ask
                ),
            )
        except CaptureError:
            raise
        except Exception as error:  # a template is a program: it raises what it likes
            raise RowError(f"the chat template refuses these messages: {_first_line(error)}") from error

    def _encode(self, text: str) -> list[int]:
        """The ids of rendered text, which brings its own special tokens: a second ``<bos>`` would shift every row."""
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_marked(self, messages: Sequence[Message], ask: bool) -> tuple[list[int], list[int]]:
        try:
            encoding = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                add_generation_prompt=ask,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:
            raise RowError(f"the chat template refuses these messages: {_first_line(error)}") from error
        mask = [int(entry) for entry in encoding["assistant_masks"]]
        if not any(mask):
            raise _undetermined(None)
        return list(encoding["input_ids"]), mask

    def _turns(self, messages: Sequence[Message], text: str) -> list[Span]:
        """Where in the rendered ``text`` each assistant's turn stands, its end token included."""
        spans: list[Span] = []
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:position], True) if position else None
            if before is None or not text.startswith(before):
                raise _undetermined(position)
            spans.append((len(before), self._turn_stop(messages, position, text, len(before))))
        if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
            raise _undetermined(None)
        return spans

    def _turn_stop(self, messages: Sequence[Message], position: int, text: str, start: int) -> int:
        """A template may lay out the last turn differently from earlier ones; then the end token is looked for."""
        through = self._render(messages[: position + 1], False)
        if text.startswith(through) and len(through) > start:
            return len(through)
        found = text.find(self._turn_end, start) if self._turn_end.strip() else -1
        if found < 0:
            raise _undetermined(position)
        return found + len(self._turn_end)

    def _encode_spans(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]]:
        """The ids of ``text``, and 1 for each whose characters are (in part) inside a span."""
        if not self._tokenizer.is_fast:
            return self._encode_spans_by_prefix(text, spans)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first, last = np.asarray(encoding["offset_mapping"]).T
        inside = np.zeros(len(first), dtype=int)
        for start, stop in spans:
            inside |= ((first >= start) & (first < stop)) | ((first < start) & (last > start))
        return list(encoding["input_ids"]), inside.tolist()

    def _encode_spans_by_prefix(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]]:
        """A tokenizer in Python does not tell characters: count the tokens that the text up to a place shares."""
        ids = self._encode(text)
        mask = [0] * len(ids)
        for start, stop in spans:
            first, last = (_common_prefix(ids, self._encode(text[:place])) for place in (start, stop))
            mask[first:last] = [1] * (last - first)
        return ids, mask


def _common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


def _undetermined(position: int | None) -> RowError:
    where = "the assistants' turns" if position is None else f"message {position + 1}, an assistant's turn,"
    return RowError(
        f"{where} cannot be found in what the chat template makes of the conversation, so there is no loss mask; "
        "use a template with {% generation %} around the assistant's text, or send input_ids with a loss_mask"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
