"""One row of training data, and the :class:`Prompt` it stands for.

A row is a JSON object with exactly one of

=================  ==================================================================================================
``messages``       ``[{"role": …, "content": …}, …]``: a whole conversation, laid out by the model's chat template
``prompt``/``text``  plain text, tokenised by the engine
``input_ids``      token ids, sent as they are; ``loss_mask`` of the same length (0 or 1) may stand beside them
=================  ==================================================================================================

and optionally ``id`` (or ``capture_id``) and ``metadata``. Other keys are left alone: training files hold many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from sglang_capture.mark import is_capture_id
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.metadata import check_metadata

if TYPE_CHECKING:
    from sglang_capture.prompts.chat import ChatTokenizer

CONTENT_KEYS = ("messages", "prompt", "text", "input_ids")
"""The keys of which a row has exactly one."""

_LARGEST_ID = 2**31 - 1
_SLUG_LENGTH = 64


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked to capture: either ``input_ids`` or ``text`` is given, never both.

    Attributes:
        capture_id: the row's own id where it has a usable one, else one derived from it or from the content.
        loss_mask: 1 for each token a trainer should learn from, as long as ``input_ids``; ``None`` if nobody said.
        metadata: what the row carries along; an id that could not be a capture id is kept here as ``id``.
        digest: xxh3-128 (32 hex digits) of the ids or the text, so of what is sent. The same id with the same digest
            is the same capture.
    """

    capture_id: str
    input_ids: list[int] | None
    text: str | None
    loss_mask: list[int] | None
    metadata: dict[str, Any]
    digest: str

    @property
    def named(self) -> bool:
        """Whether the row gave itself an id."""
        return self.capture_id != _default_id(self.digest)


def parse_row(row: Mapping[str, Any], tokenizer: ChatTokenizer | None) -> Prompt:
    """The prompt that a row stands for.

    Args:
        tokenizer: lays out ``messages``; rows of the other kinds do without one.

    Raises:
        RowError: the row has none or several of the content keys, or one of its values is malformed.
    """
    key = content_key(row)
    ids: list[int] | None = None
    text: str | None = None
    mask: list[int] | None = None
    if key == "input_ids":
        ids = _parse_ids(row[key])
        mask = _parse_mask(row.get("loss_mask"), len(ids))
    else:
        if row.get("loss_mask") is not None:
            raise RowError(f"loss_mask needs input_ids, one entry per id; found it beside {key}")
        if key == "messages":
            ids, mask = _encode(row[key], tokenizer)
        else:
            text = _parse_text(row[key], key)
    digest = _digest(ids, text)
    capture_id, metadata = identity(row)
    return Prompt(capture_id or _default_id(digest), ids, text, mask, metadata, digest)


def identity(row: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The capture id that a row's own id gives, ``None`` without one, and its metadata.

    An id that cannot be a capture id becomes one (its letters and a digest), and is kept in the metadata as ``id``.

    Raises:
        RowError: the id or the metadata is malformed.
    """
    own, metadata = row_id(row), _parse_metadata(row.get("metadata"))
    if own is None or is_capture_id(own):
        return own, metadata
    metadata.setdefault("id", own)
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", own).strip("-")[:_SLUG_LENGTH]
    return f"{slug or 'r'}-{xxhash.xxh3_64_hexdigest(own.encode('utf-8', 'backslashreplace'))}", metadata


def check_vocabulary(prompt: Prompt, vocab_size: int) -> None:
    """Check that every id of ``prompt`` is in the model's vocabulary; one outside can kill a stock scheduler.

    Raises:
        RowError: an id is outside; the message names it and its position.
    """
    if not prompt.input_ids or max(prompt.input_ids) < vocab_size:
        return
    position = next(i for i, token in enumerate(prompt.input_ids) if token >= vocab_size)
    raise RowError(
        f"token id {prompt.input_ids[position]} at position {position} is outside the vocabulary of {vocab_size}: "
        "were the ids made with another model's tokenizer?"
    )


def content_key(row: Mapping[str, Any]) -> str:
    """Which of :data:`CONTENT_KEYS` a row has.

    Raises:
        RowError: none of them, or several.
    """
    found = [key for key in CONTENT_KEYS if row.get(key) is not None]
    if len(found) == 1:
        return found[0]
    what = f"both {' and '.join(found)}" if found else f"only {', '.join(map(repr, row)) or 'an empty object'}"
    raise RowError(f"a row needs exactly one of messages, prompt (or text), input_ids; found {what:.200}")


def _parse_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        raise RowError("input_ids must be a list of one or more token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _LARGEST_ID:
            raise RowError(f"input_ids must be whole numbers ≥ 0; found {token!r:.80} at position {position}")
    return cast("list[int]", value)


def _parse_mask(value: object, length: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(entry not in (0, 1) for entry in value):
        raise RowError("loss_mask must be a list of 0 and 1")
    if len(value) != length:
        raise RowError(f"loss_mask has {len(value)} entries for {length} input_ids; both must be as long")
    return [int(entry) for entry in value]


def _parse_text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise RowError(f"{key} must be a text that is not empty")
    _check_encodable(value, key)
    return value


def _check_encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name} holds half a surrogate pair at character {error.start}: it is no valid text") from None


def _encode(messages: object, tokenizer: ChatTokenizer | None) -> tuple[list[int], list[int] | None]:
    check_messages(messages)
    if tokenizer is None:
        raise RowError("messages need the model's tokenizer, and there is none here; name it, or send input_ids")
    return tokenizer.encode_messages(cast("list[dict[str, Any]]", messages))


def check_messages(messages: object) -> None:
    """Check that this is a conversation of texts, without laying it out.

    Raises:
        RowError: it is not; the message says which of its messages is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("messages must be a list of one or more messages")
    for number, message in enumerate(messages, start=1):
        _check_message(message, f"message {number}")


def _check_message(message: object, name: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError(f'{name} must look like {{"role": "user", "content": "…"}}; found {message!r:.80}')
    content = message.get("content")
    if isinstance(content, str):
        _check_encodable(content, name)
    elif isinstance(content, list):
        _check_parts(content, name)
    elif content is not None or not message.get("tool_calls"):
        raise RowError(f"{name} needs a content that is text; found {content!r:.80}")


def _check_parts(parts: Sequence[object], name: str) -> None:
    """A picture that only a placeholder stands for would be captured as if it had been seen: refuse it."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RowError(f"{name} holds a part that is no text ({part!r:.60}); only text is laid out here")


def _parse_metadata(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"metadata must be an object; found {value!r:.80}")
    check_metadata(value)
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:  # NaN, infinity, half a surrogate pair: Python reads them, JSON has no such thing
        raise RowError(f"metadata holds what JSON cannot: {error}") from None
    return dict(value)


def _digest(ids: list[int] | None, text: str | None) -> str:
    hasher = xxhash.xxh3_128(b"ids" if text is None else b"text")
    hasher.update(np.asarray(ids, dtype="<i8").tobytes() if text is None else text.encode())
    return hasher.hexdigest()


def _default_id(digest: str) -> str:
    return f"r-{digest}"


def row_id(row: Mapping[str, Any]) -> str | None:
    """The id a row gives itself, a whole number as its digits; ``None`` if it gives none.

    Raises:
        RowError: it is neither text nor a whole number, or ``id`` and ``capture_id`` say different things.
    """
    given = [row[key] for key in ("capture_id", "id") if row.get(key) is not None]
    for value in given:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise RowError(f"an id must be text or a whole number; found {value!r:.80}")
    if len({str(value) for value in given}) > 1:
        raise RowError(f"id and capture_id must agree where both are given; found {given!r:.120}")
    return str(given[0]) if given else None
