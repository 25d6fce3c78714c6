"""Where rows come from: a file of JSON lines, a JSON list, a parquet file, or a Hugging Face dataset.

Whatever the source, rows are read one after the other when they are asked for, and have a number by which they can be
found again: a file's line, else the row, counted from 1.
"""

from __future__ import annotations

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from sglang_capture.errors import UsageError
from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.formats import ROW_KEYS
from sglang_capture.prompts.jsonl import Row, read_lines, read_list
from sglang_capture.prompts.rows import row_id
from sglang_capture.prompts.tables import (
    dataset_count,
    dataset_rows,
    load_hub,
    load_saved,
    parquet_count,
    parquet_rows,
)

HUB = "hf:"
"""How the name of a dataset on the Hub begins."""

Seen = Callable[[int], object]
"""Called with the bytes that were read."""


def _ignore(_bytes: int) -> None:
    """Nobody watches."""


class RowSource(ABC):
    """Rows to be read, once or several times.

    Attributes:
        size: bytes, where reading it is worth a bar.
    """

    size: int | None = None
    _place = ", row {}"

    def __init__(self, name: str) -> None:
        self.name = name

    def rows(self, seen: Seen = _ignore) -> Iterator[tuple[int, Row]]:
        """The rows with their numbers. One that is no object, or that gives other content to an id seen before, comes
        as a :class:`RowError` in its place, and reading goes on. What is remembered is two numbers for each id.

        Raises:
            UsageError: the source cannot be read.
        """
        return check_repeated(self._read(seen))

    def count(self, seen: Seen = _ignore) -> int | None:
        """How many rows there are; ``None`` where that is only known at the end. Raises as :meth:`rows`."""
        return sum(1 for _ in self._read(seen))

    def place(self, number: int) -> str:
        """How a row is named in a message."""
        return self.name + self._place.format(number)

    @abstractmethod
    def _read(self, seen: Seen) -> Iterator[tuple[int, Row]]:
        """The rows as they stand there."""


class LinesFile(RowSource):
    """A file of JSON lines."""

    _place = ":{}"

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self.size = _size(path)

    def count(self, seen: Seen = _ignore) -> int:
        return sum(1 for line in self._lines(seen) if line.strip())

    def _read(self, seen: Seen) -> Iterator[tuple[int, Row]]:
        return read_lines(self._lines(seen))

    def _lines(self, seen: Seen) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            for line in file:
                seen(len(line))
                yield line


class ListFile(RowSource):
    """A JSON file that holds one list."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self.size = _size(path)

    def _read(self, seen: Seen) -> Iterator[tuple[int, Row]]:
        with self._path.open("rb") as raw:
            done = 0
            for number, row in read_list(io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape")):
                yield number, row
                seen(raw.tell() - done)
                done = raw.tell()


class ParquetFile(RowSource):
    """A parquet file."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        _size(path)

    def count(self, seen: Seen = _ignore) -> int:
        return parquet_count(self._path)

    def _read(self, seen: Seen) -> Iterator[tuple[int, Row]]:
        return enumerate(parquet_rows(self._path), start=1)


class HuggingFaceDataset(RowSource):
    """A dataset of Hugging Face's library; loaded when it is first needed."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        super().__init__(name)
        self._load = load

    @cached_property
    def _dataset(self) -> Any:
        return self._load()

    def count(self, seen: Seen = _ignore) -> int | None:
        return dataset_count(self._dataset)

    def _read(self, seen: Seen) -> Iterator[tuple[int, Row]]:
        return enumerate(dataset_rows(self._dataset), start=1)


def open_source(name: str, *, split: str | None = None, subset: str | None = None) -> RowSource:
    """The rows that ``name`` stands for: a file by the end of its name (``.jsonl`` or any other: JSON lines, ``.json``,
    ``.parquet``), a directory that ``save_to_disk`` wrote or that holds a dataset's files, or ``hf:NAME[:SPLIT]``.

    Raises:
        UsageError: there is nothing of that name, or ``split`` or ``subset`` do not go with it.
    """
    if name.startswith(HUB):
        return _hub(name, split, subset)
    path = Path(name)
    if subset is not None:
        raise UsageError(f"--subset is for datasets of the Hub, named {HUB}NAME; found {name}")
    if path.is_dir():
        return HuggingFaceDataset(name, lambda: load_saved(path, split))
    if split is not None:
        raise UsageError(f"--split is for datasets, a directory or {HUB}NAME; found the file {name}")
    if path.suffix == ".parquet":
        return ParquetFile(path)
    return ListFile(path) if path.suffix == ".json" and _begins_a_list(path) else LinesFile(path)


def read_jsonl(source: Path | Iterable[str | bytes]) -> Iterator[tuple[int, Row]]:
    """The rows of a file of JSON lines (or of an iterable of lines), as :meth:`RowSource.rows` gives them."""
    if isinstance(source, Path):
        return LinesFile(source).rows()
    return check_repeated(read_lines(source))


def check_repeated(rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """The rows, with an error in the place of each that gives other content to an id seen before.

    An id may come again with the same content (a file may hold a row twice), never with another.
    """
    seen: dict[int, int] = {}
    for number, row in rows:
        yield number, row if isinstance(row, RowError) else (_repeated(row, seen) or row)


def _repeated(row: dict[str, Any], seen: dict[int, int]) -> RowError | None:
    try:
        own = row_id(row)
    except RowError as error:
        return error
    if own is None:
        return None
    content = [row.get(key) for key in ROW_KEYS]
    try:
        digest = xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True, default=str).encode())
    except (RecursionError, TypeError) as error:  # too deep; or keys of other types, which some tables have
        return RowError(f"this row is no JSON that can be written: {error}")
    first = seen.setdefault(xxhash.xxh3_64_intdigest(own.encode("utf-8", "surrogatepass")), digest)
    return None if first == digest else RowError(f"id {own!r:.80} stands on an earlier line with other content")


def _hub(name: str, split: str | None, subset: str | None) -> RowSource:
    repository, _, named = name.removeprefix(HUB).partition(":")
    if not repository:
        raise UsageError(f"a dataset of the Hub is named {HUB}NAME or {HUB}NAME:SPLIT; found {name}")
    if named and split is not None and named != split:
        raise UsageError(f"{name} names the split {named}, and --split {split}: name one")
    return HuggingFaceDataset(name, lambda: load_hub(repository, subset, named or split))


def _size(path: Path) -> int:
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; name a file (.jsonl, .json, .parquet), a directory with a "
            f"Hugging Face dataset, or {HUB}NAME"
        ) from error


def _begins_a_list(path: Path) -> bool:
    """Some files of JSON lines are named ``.json``."""
    _size(path)
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
