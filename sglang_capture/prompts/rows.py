"""One row of training data, and the :class:`Prompt` it stands for.

What a row holds is recognised in :mod:`~sglang_capture.prompts.formats`; optionally it has ``id`` (or ``capture_id``)
and ``metadata``. Other keys are left alone: training files hold many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xxhash

from sglang_capture.mark import is_capture_id
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.formats import canonical
from sglang_capture.prompts.lengths import Layout, lay_out
from sglang_capture.prompts.metadata import check_metadata
from sglang_capture.spec import PROMPT_LINEAGE

if TYPE_CHECKING:
    from sglang_capture.prompts.chat import ChatTokenizer

CUT_KEY = "cut_from_tokens"
"""Where a sample's metadata says how long it was before it was cut."""

_LARGEST_ID = 2**31 - 1
_SLUG_LENGTH = 64
_SPECIAL_TOKENS = 8
"""Most tokens that a tokenizer puts around a text by itself."""


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked to capture: either ``input_ids`` or ``text`` is given, never both.

    Attributes:
        capture_id: the row's own id where it has a usable one, else one derived from it or from the content.
        loss_mask: 1 for each token a trainer should learn from, as long as ``input_ids``; ``None`` if nobody said.
        metadata: what the row carries along; an id that could not be a capture id is kept here as ``id``, what made
            the ids and the mask as ``prompt_lineage``.
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
        return self.capture_id != content_id(self.digest)


def parse_row(
    row: Mapping[str, Any],
    tokenizer: ChatTokenizer | None,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    *,
    column: str | None = None,
) -> Prompt:
    """The prompt that a row stands for.

    Args:
        tokenizer: lays out ``messages``; rows of the other kinds do without one, but for a text that is to be cut.
        column: as for :func:`~sglang_capture.prompts.formats.canonical`.

    Raises:
        RowError: the row cannot be recognised, or one of its values is malformed; TooLong, if only its length is wrong.
    """
    row = canonical(row, column)
    capture_id, metadata = identity(row)
    text: str | None = row.get("text")
    ids, mask, lineage = _tokens(row, tokenizer, layout)
    if ids is not None:
        whole = len(ids)
        ids, mask = lay_out(ids, mask, layout)
        text = None
        if len(ids) < whole:
            metadata[CUT_KEY] = whole
    if lineage is not None:
        metadata[PROMPT_LINEAGE] = lineage
    digest = _digest(ids, text)
    return Prompt(capture_id or content_id(digest), ids, text, mask, metadata, digest)


def lineage_of(tokenizer: ChatTokenizer, layout: Layout, mask_rule: str) -> dict[str, Any]:
    """What made the ids and the mask of a conversation: digests of tokenizer and template, the rule of the mask."""
    return {
        "tokenizer": tokenizer.digest,
        "template": tokenizer.template_digest,
        "mask_rule": f"{mask_rule}, last turn only" if layout.only_last_turn and mask_rule != "none" else mask_rule,
        "max_length": layout.max_length,
    }


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


def content_id(digest: str) -> str:
    """The capture id of a row that has none of its own."""
    return f"r-{digest}"


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


def parse_ids(value: object) -> list[int]:
    """Token ids, checked to be such.

    Raises:
        RowError: they are not.
    """
    if not isinstance(value, list) or not value:
        raise RowError(f"input_ids must be a list of one or more token ids; found {value!r:.80}")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _LARGEST_ID:
            raise RowError(f"input_ids must be whole numbers ≥ 0; found {token!r:.80} at position {position}")
    return cast("list[int]", value)


def _tokens(
    row: Mapping[str, Any], tokenizer: ChatTokenizer | None, layout: Layout
) -> tuple[list[int] | None, list[int] | None, dict[str, Any] | None]:
    """Ids, mask and lineage, as far as they are made here; a text is tokenized by the engine unless it must be cut."""
    if "input_ids" in row:
        ids = parse_ids(row["input_ids"])
        return ids, _parse_mask(row.get("loss_mask"), len(ids)), None
    if "messages" in row:
        if tokenizer is None:
            raise RowError("messages need the model's tokenizer, and there is none here; name it, or send input_ids")
        encoded, mask = tokenizer.encode_messages(row["messages"], tools=row.get("tools"))
        rule = tokenizer.mask_rule if any(mask) else "none"
        return encoded, mask, lineage_of(tokenizer, layout, rule)
    return _cut_text(row["text"], tokenizer, layout.max_length), None, None


def _cut_text(text: str, tokenizer: ChatTokenizer | None, most: int | None) -> list[int] | None:
    """The first ``most`` ids of a text that has more: it has no answers, so it may end anywhere."""
    if most is None or len(text.encode()) + _SPECIAL_TOKENS <= most:  # a token has a byte at least
        return None
    if tokenizer is None:
        raise RowError("a text can be cut to a length only with the model's tokenizer, and there is none here")
    ids = tokenizer.encode_text(text)
    return ids[:most] if len(ids) > most else None


def _parse_mask(value: object, length: int) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(entry not in (0, 1) for entry in value):
        raise RowError(f"loss_mask must be a list of 0 and 1; found {value!r:.80}")
    if len(value) != length:
        raise RowError(f"loss_mask has {len(value)} entries for {length} input_ids; both must be as long")
    return [int(entry) for entry in value]


def _parse_metadata(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"metadata must be an object; found {value!r:.80}")
    check_metadata(value)
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:  # NaN, half a surrogate pair, a table's dates: JSON has no such thing
        raise RowError(f"metadata holds what JSON cannot: {error}") from None
    return dict(value)


def _digest(ids: list[int] | None, text: str | None) -> str:
    hasher = xxhash.xxh3_128(b"ids" if text is None else b"text")
    hasher.update(np.asarray(ids, dtype="<i8").tobytes() if text is None else text.encode())
    return hasher.hexdigest()
