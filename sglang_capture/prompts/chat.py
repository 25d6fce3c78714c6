"""A conversation as the model reads it, and which of its tokens the model wrote.

The layout is the model's own chat template. The loss mask marks what an assistant wrote, the token that ends its turn
included. Templates that mark it themselves (``{% generation %}``) are believed; most do not, and then
:mod:`~sglang_capture.prompts.turns` finds it by rendering.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import xxhash

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.names import find, first_line
from sglang_capture.prompts.coverage import cover, tokens_of
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.generation import free_characters, marked_spans, marks_generation, with_marks
from sglang_capture.prompts.messages import Message
from sglang_capture.prompts.turns import Span, TurnMarks, find_turns, turn_marks, undetermined

_MASK_RULES = {True: "generation-tags/2", False: "turns-by-rendering/2"}
"""How masks are made, by whether the template marks what it generates; the number grows when a rule changes."""


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
            UsageError: there is no such tokenizer, or it cannot be loaded; the message says what to do.
            CaptureError: transformers is not installed.
        """
        _ = self._tokenizer

    def encode_messages(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """The ids of a conversation, and for each 1 if an assistant wrote it, else 0.

        A conversation that does not end with an assistant's turn gets the prompt for one appended, as the engine's
        chat route would do.

        Args:
            tools: what the model is told of, handed to the template as they are.

        Raises:
            RowError: the template refuses the conversation, or it cannot be told which tokens an assistant wrote.
            CaptureError: as :meth:`load`.
        """
        ask = messages[-1]["role"] != "assistant"
        if all(message["role"] != "assistant" for message in messages):
            ids = self.encode(self.render(messages, ask=ask, tools=tools))
            return ids, [0] * len(ids)
        if self._marks_generation:
            return self._encode_marked(messages, ask, tools)
        text = self.render(messages, ask=ask, tools=tools)
        spans = find_turns(messages, text, lambda some, ask: self.render(some, ask=ask, tools=tools), self._turn_marks)
        return self._encode_spans(text, spans)

    def render(self, messages: Sequence[Message], *, ask: bool, tools: list[Any] | None = None) -> str:
        """The conversation as text; with ``ask`` it ends with the prompt for an answer. Raises as encode_messages."""
        return self._lay_out(self._template, messages, ask=ask, tools=tools)

    def _lay_out(self, template: str, messages: Sequence[Message], *, ask: bool, tools: list[Any] | None) -> str:
        try:
            return cast(
                str,
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=ask,
                ),
            )
        except CaptureError:
            raise
        except Exception as error:  # a template is a program: it raises what it likes
            raise RowError(f"the chat template refuses these messages: {first_line(error)}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text, which brings its own special tokens: a second ``<bos>`` would shift every row."""
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_text(self, text: str) -> list[int]:
        """The ids that the engine makes of plain text, special tokens included. Raises CaptureError as :meth:`load`."""
        return cast("list[int]", self._tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included, as a template or a reader shall see it."""
        plainly = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return cast(str, self._tokenizer.decode(ids, skip_special_tokens=False, **plainly))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of the vocabulary and, where it is the ``tokenizers`` library's, of all its rules."""
        if self._tokenizer.is_fast:
            content = self._tokenizer.backend_tokenizer.to_str()
        else:
            content = repr(sorted(self._tokenizer.get_vocab().items()))
        return xxhash.xxh3_128_hexdigest(content.encode("utf-8", "surrogatepass"))

    @cached_property
    def template_digest(self) -> str:
        """xxh3-128 of the chat template's text. Raises UsageError: there is none."""
        return xxhash.xxh3_128_hexdigest(self._template.encode())

    @property
    def mask_rule(self) -> str:
        """How :meth:`encode_messages` makes masks, with the number of the rule's revision."""
        return _MASK_RULES[self._marks_generation]

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise CaptureError(
                "laying out messages needs transformers: pip install 'sglang-capture[transformers]', "
                "or send rows with input_ids or text"
            ) from None
        find(self.path, "--model or --tokenizer")
        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # the loaders of the many tokenizers raise whatever they like
            hint = (
                "it brings its own code: allow that with --trust-remote-code if you trust it"
                if "trust_remote_code" in str(error)
                else "name the directory or the Hub name of the model's tokenizer with --tokenizer"
            )
            raise UsageError(f"no tokenizer could be loaded from {self.path}: {first_line(error)}; {hint}") from error

    @cached_property
    def _template(self) -> str:
        try:
            return cast(str, self._tokenizer.get_chat_template())
        except ValueError as error:
            raise UsageError(
                f"the tokenizer {self.path} has no chat template to lay out messages with: "
                "send rows with text or input_ids"
            ) from error

    @property
    def _marks_generation(self) -> bool:
        """Only tokenizers of the ``tokenizers`` library know which characters a token covers."""
        return marks_generation(self._template) and bool(self._tokenizer.is_fast)

    @cached_property
    def _turn_marks(self) -> TurnMarks:
        return turn_marks(lambda messages, ask: self.render(messages, ask=ask))

    def _encode_marked(
        self, messages: Sequence[Message], ask: bool, tools: list[Any] | None
    ) -> tuple[list[int], list[int]]:
        """By the characters that the template marks."""
        text = self.render(messages, ask=ask, tools=tools)
        if (marks := free_characters(text)) is None:
            raise undetermined(None)
        marked = self._lay_out(with_marks(self._template, marks), messages, ask=ask, tools=tools)
        if (spans := marked_spans(marked, text, marks)) is None:
            raise undetermined(None)
        ids, mask = self._encode_spans(text, spans)
        if not any(mask):
            raise undetermined(None)
        return ids, mask

    def _encode_spans(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]]:
        """The ids of ``text``, and 1 for each whose characters are (in part) inside a span."""
        spans = [(start, stop) for start, stop in spans if start < stop]
        if self._tokenizer.is_fast:
            coverage = cover(self._tokenizer, text)
            return coverage.ids, coverage.mask(spans)
        ids = self.encode(text)
        mask = [0] * len(ids)
        for span in spans:
            first, last = tokens_of(ids, text, span, self.decode, self.encode)
            mask[first:last] = [1] * (last - first)
        return ids, mask
