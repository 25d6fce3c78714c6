"""Reading a JSONL file so that one bad line costs one line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from sglang_capture.errors import UsageError
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.rows import CONTENT_KEYS, row_id

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(source: Path | Iterable[str | bytes]) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """The rows of a file (or of an iterable of lines) with their line numbers, which start at 1.

    A line that is no JSON object, or that gives other content to an id seen before, comes as a :class:`RowError` in its
    place, and reading goes on. Blank lines are skipped. A line is read when it is asked for; what is remembered of
    a file is two numbers per id.

    Raises:
        UsageError: the file cannot be opened.
    """
    seen: dict[int, int] = {}
    for number, line in enumerate(_lines(source), start=1):
        data = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
        data = data.removeprefix(_BYTE_ORDER_MARK).strip()
        if data:
            yield number, _row(data, seen)


def _lines(source: Path | Iterable[str | bytes]) -> Iterator[str | bytes]:
    if not isinstance(source, Path):
        yield from source
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}; name a JSONL file") from error
    with file:
        yield from file


def _row(data: bytes, seen: dict[int, int]) -> dict[str, Any] | RowError:
    try:
        row = json.loads(data)
    except UnicodeDecodeError:
        return RowError("this line is not UTF-8")
    except json.JSONDecodeError as error:
        return RowError(f"this line is no JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return RowError(f"this line is no JSON that can be read: {error}")
    if not isinstance(row, dict):
        return RowError(f"a line must be a JSON object; found {data[:60].decode('utf-8', 'replace')}")
    return _check_repeated(row, seen) or row


def _check_repeated(row: dict[str, Any], seen: dict[int, int]) -> RowError | None:
    """An id may come again with the same content (a file may hold a row twice), never with another."""
    try:
        own = row_id(row)
    except RowError as error:
        return error
    if own is None:
        return None
    content = [row.get(key) for key in (*CONTENT_KEYS, "loss_mask")]
    digest = xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode())
    first = seen.setdefault(xxhash.xxh3_64_intdigest(own.encode("utf-8", "surrogatepass")), digest)
    return None if first == digest else RowError(f"id {own!r:.80} stands on an earlier line with other content")
