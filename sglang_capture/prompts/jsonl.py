"""Reading JSON lines, or a JSON list, so that one bad row costs one row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from sglang_capture.prompts.errors import RowError

Row = dict[str, Any] | RowError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_NEAR = 32
"""A fault so near the end of what was read may be the end of what was read."""


def read_lines(lines: Iterable[str | bytes]) -> Iterator[tuple[int, Row]]:
    """The objects of JSON lines with the lines' numbers, which start at 1; blank lines are skipped.

    A line that is no JSON object comes as a :class:`RowError` in its place, and reading goes on.
    """
    for number, line in enumerate(lines, start=1):
        data = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
        data = data.removeprefix(_BYTE_ORDER_MARK).strip()
        if data:
            yield number, _parse_line(data)


def read_list(file: TextIO) -> Iterator[tuple[int, Row]]:
    """The objects of a JSON list with their numbers, which start at 1, read piece by piece.

    What stands behind a fault in the JSON itself cannot be read: the :class:`RowError` there is the last.
    """
    text = _Text(file)
    text.skip("")
    if text.next() != "[":
        yield 1, RowError("a .json file must hold a list of objects; is it JSON lines, then name it .jsonl")
        return
    text.place += 1
    number = 1
    while text.skip(",") != "]":
        try:
            value = text.value()
        except (ValueError, RecursionError) as error:
            yield number, RowError(f"the list cannot be read from here on: {error}")
            return
        yield number, value if isinstance(value, dict) else _no_object(json.dumps(value))
        number += 1


class _Text:
    """A text with a place in it, of which only what is needed is in memory."""

    def __init__(self, file: TextIO) -> None:
        self.place = 0
        self._file = file
        self._buffer = ""
        self._decode = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """The character at the place; empty at the end."""
        return self._buffer[self.place : self.place + 1]

    def skip(self, more: str) -> str:
        """Go behind white space, and one of ``more``; the character there."""
        while True:
            while self.place < len(self._buffer) and self._buffer[self.place] in " \t\r\n" + more:
                if self._buffer[self.place] in more:
                    more = ""
                self.place += 1
            if self.place < len(self._buffer) or not self._read(_CHUNK):
                return self.next()

    def value(self) -> Any:
        """The JSON value that begins at the place, behind which the place is then.

        Raises:
            ValueError, RecursionError: there is none.
        """
        size = _CHUNK
        while True:
            try:
                value, end = self._decode(self._buffer, self.place)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._buffer) - _NEAR or error.msg.startswith("Unterminated string")
                if not cut or not self._read(size):
                    raise
            else:
                if end < len(self._buffer) or not self._read(size):
                    self.place = end
                    return value
            size *= 2

    def _read(self, size: int) -> bool:
        more = self._file.read(size)
        self._buffer, self.place = self._buffer[self.place :] + more, 0
        return bool(more)


def _parse_line(data: bytes) -> Row:
    try:
        row = json.loads(data)
    except UnicodeDecodeError:
        return RowError("this line is not UTF-8")
    except json.JSONDecodeError as error:
        return RowError(f"this line is no JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return RowError(f"this line is no JSON that can be read: {error}")
    return row if isinstance(row, dict) else _no_object(data.decode("utf-8", "replace"))


def _no_object(shown: str) -> RowError:
    return RowError(f"a row must be a JSON object; found {shown:.60}")
