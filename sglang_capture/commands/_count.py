"""Counting the tokens of a file, all of them or by a sample."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from sglang_capture.prompts import ChatTokenizer, Prompt, RowError, canonical, check_vocabulary, parse_row
from sglang_capture.prompts.rows import identity

_SEED = 0
_FAULTS_KEPT = 1000


@dataclass
class TokenCount:
    """How long the conversations of a file are; ``sampled`` rows were tokenized, or all if it is ``None``.

    ``duplicates`` are captured once, as their first, and are in no other figure.
    """

    rows: int = 0
    duplicates: int = 0
    tokens: int = 0
    longest: int = 0
    bad_rows: int = 0
    sampled: int | None = None
    faults: list[tuple[int, str]] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        self.rows += 1
        self.tokens += tokens
        self.longest = max(self.longest, tokens)

    def reject(self, line: int, error: RowError) -> None:
        self.bad_rows += 1
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append((line, str(error)))


Rows = Iterator[tuple[int, dict[str, Any] | RowError]]


def canonical_rows(rows: Rows, column: str | None) -> Rows:
    """The rows in one shape, with an error in the place of each that cannot be recognised."""
    for line, row in rows:
        try:
            yield line, row if isinstance(row, RowError) else canonical(row, column)
        except RowError as error:
            yield line, error


def count_tokens(rows: Rows, tokenizer: ChatTokenizer, vocab_size: int | None = None) -> TokenCount:
    """Every row, tokenized and told from those before it as a run would.

    Args:
        vocab_size: rows with ids outside are bad; ``None`` if it is not known.

    Raises:
        CaptureError: the tokenizer is needed and cannot be loaded.
    """
    count, seen = TokenCount(), set[int]()
    for line, row in rows:
        try:
            prompt = _prompt(row, tokenizer, vocab_size)
        except RowError as error:
            count.reject(line, error)
            continue
        if _repeats(prompt.capture_id, seen):
            count.duplicates += 1
        else:
            count.add(_length(prompt, tokenizer))
    return count


def sample_tokens(rows: Rows, tokenizer: ChatTokenizer, size: int, vocab_size: int | None = None) -> TokenCount:
    """Tokens for each character in ``size`` rows drawn at random, times the characters of all rows.

    What a conversation is long in characters varies far more than what a character is in tokens, so few rows suffice.
    The same file gives the same answer. Rows without an id are told from each other by what they hold, not by their
    tokens, as a run does: that differs only where different rows are laid out the same.
    """
    count = TokenCount(sampled=0)
    draw, drawn = random.Random(_SEED), list[tuple[int, dict[str, Any]]]()
    characters, longest, seen = 0, 0, set[int]()
    for line, row in rows:
        try:
            length, key = _characters(row), _key(row)
        except RowError as error:
            count.reject(line, error)
            continue
        if _repeats(key, seen):
            count.duplicates += 1
            continue
        characters, longest = characters + length, max(longest, length)
        place = draw.randrange(count.rows + 1) if count.rows >= size else count.rows
        count.rows += 1
        if place < size and isinstance(row, dict):
            drawn[place : place + 1] = [(line, row)]
    measured = count_tokens(iter(drawn), tokenizer, vocab_size)
    count.faults.extend(measured.faults)
    count.bad_rows += measured.bad_rows
    share = measured.tokens / max(1, sum(_characters(row) for _, row in drawn))
    count.tokens, count.longest = round(share * characters), round(share * longest)
    count.sampled = measured.rows
    return count


def _prompt(row: Mapping[str, Any] | RowError, tokenizer: ChatTokenizer, vocab_size: int | None) -> Prompt:
    if isinstance(row, RowError):
        raise row
    prompt = parse_row(row, tokenizer)
    if vocab_size is not None:
        check_vocabulary(prompt, vocab_size)
    return prompt


def _repeats(key: str, seen: set[int]) -> bool:
    number = xxhash.xxh3_64_intdigest(key.encode())
    known = number in seen
    seen.add(number)
    return known


def _key(row: Mapping[str, Any] | RowError) -> str:
    """What tells a row from another before it is tokenized: the id that it would have, or what it holds."""
    if isinstance(row, RowError):
        raise row
    content = [row.get(name) for name in ("messages", "tools", "text", "input_ids")]
    return identity(row)[0] or json.dumps(content, sort_keys=True, default=str)


def _length(prompt: Prompt, tokenizer: ChatTokenizer) -> int:
    return len(tokenizer.encode_text(prompt.text or "") if prompt.input_ids is None else prompt.input_ids)


def _characters(row: Mapping[str, Any] | RowError) -> int:
    """A measure of a row's length that costs no tokenizing; for ids, it is their number."""
    if isinstance(row, RowError):
        raise row
    content = row.get("text") or row.get("messages") or row["input_ids"]
    if not isinstance(content, list):
        return len(str(content))
    return sum(len(str(item.get("content"))) if isinstance(item, dict) else 1 for item in content)
