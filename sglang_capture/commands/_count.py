"""Counting the tokens of a file, all of them or by a sample."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_capture.prompts import ChatTokenizer, RowError, canonical, parse_row

_SEED = 0
_FAULTS_KEPT = 1000


@dataclass
class TokenCount:
    """How long the conversations of a file are; ``sampled`` rows were tokenized, or all if it is ``None``."""

    rows: int = 0
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


def count_tokens(rows: Rows, tokenizer: ChatTokenizer) -> TokenCount:
    """Every row, tokenized as a run would. Raises CaptureError if the tokenizer is needed and cannot be loaded."""
    count = TokenCount()
    for line, row in rows:
        try:
            count.add(_length(row, tokenizer))
        except RowError as error:
            count.reject(line, error)
    return count


def sample_tokens(rows: Rows, tokenizer: ChatTokenizer, size: int) -> TokenCount:
    """Tokens for each character in ``size`` rows drawn at random, times the characters of all rows.

    What a conversation is long in characters varies far more than what a character is in tokens, so few rows suffice.
    The same file gives the same answer.
    """
    count = TokenCount(sampled=0)
    draw, drawn = random.Random(_SEED), list[tuple[int, dict[str, Any]]]()
    characters = longest = 0
    for line, row in rows:
        try:
            length = _characters(row)
        except RowError as error:
            count.reject(line, error)
            continue
        characters, longest = characters + length, max(longest, length)
        place = draw.randrange(count.rows + 1) if count.rows >= size else count.rows
        count.rows += 1
        if place < size and isinstance(row, dict):
            drawn[place : place + 1] = [(line, row)]
    measured = _measure(drawn, tokenizer, count)
    share = measured.tokens / max(1, sum(_characters(row) for _, row in drawn))
    count.tokens, count.longest = round(share * characters), round(share * longest)
    count.sampled = measured.rows
    return count


def _measure(drawn: list[tuple[int, dict[str, Any]]], tokenizer: ChatTokenizer, count: TokenCount) -> TokenCount:
    measured = count_tokens(iter(drawn), tokenizer)
    count.faults.extend(measured.faults)
    count.bad_rows += measured.bad_rows
    return measured


def _length(row: Mapping[str, Any] | RowError, tokenizer: ChatTokenizer) -> int:
    if isinstance(row, RowError):
        raise row
    prompt = parse_row(row, tokenizer)
    return len(tokenizer.encode_text(prompt.text or "") if prompt.input_ids is None else prompt.input_ids)


def _characters(row: Mapping[str, Any] | RowError) -> int:
    """A measure of a row's length that costs no tokenizing; for ids, it is their number."""
    if isinstance(row, RowError):
        raise row
    content = row.get("text") or row.get("messages") or row["input_ids"]
    if not isinstance(content, list):
        return len(str(content))
    return sum(len(str(item.get("content"))) if isinstance(item, dict) else 1 for item in content)
