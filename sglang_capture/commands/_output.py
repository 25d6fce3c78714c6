"""How commands speak: results on stdout (as lines, or as JSON for machines), progress and remarks on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from sglang_capture.prompts import RowError, RowSource

MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "wrong": ("✗", "red")}
"""How good, doubtful and wrong lines begin."""


def error_console() -> Console:
    """Where progress and remarks go; a terminal or not, stdout stays for the result."""
    return Console(stderr=True, highlight=False)


def print_json(result: BaseModel | dict[str, Any]) -> None:
    """One JSON object on standard output, and nothing else."""
    content = result if isinstance(result, dict) else result.model_dump(mode="json")
    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Two columns: what, and what it is."""
    rows = list(facts)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def say(text: str, state: str = "", *, console: Console | None = None) -> None:
    """One line, marked with how things stand if ``state`` says so; never read as markup."""
    mark, style = MARKS.get(state, ("", ""))
    (console or Console(highlight=False)).print(Text.assemble((mark, style), " " if mark else "", text), soft_wrap=True)


def say_masks(all_zero: int, all_one: int) -> None:
    """A warning where masks teach nothing, or teach what users say as well."""
    if all_zero:
        say(f"{plural(all_zero, 'loss mask')} all zero: a draft learns nothing from such rows", "warn")
    if all_one:
        say(f"{plural(all_one, 'loss mask')} all one: a draft would learn the questions too", "warn")


def human_bytes(size: float) -> str:
    """``1.5 GiB``"""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def plural(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``"""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """A callback for the work done and the work in all; a bar on standard error where that is a terminal."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = error_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def reading_bar(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """A callback for bytes that were read; a bar on a terminal that shows how much of ``size`` it is."""
    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=size is None or not console.is_terminal) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)


@contextmanager
def rows_with_bar(source: RowSource, what: str) -> Iterator[Iterator[tuple[int, dict[str, Any] | RowError]]]:
    """The rows of a source, with a bar of what was read of it: bytes of a file, rows of a table."""
    if source.size is not None:
        with reading_bar(what, source.size) as seen:
            yield source.rows(seen)
        return
    total = source.count()
    with progress_bar(what) as advance:
        yield _counted(source.rows(), total, advance)


def _counted(
    rows: Iterator[tuple[int, dict[str, Any] | RowError]], total: int | None, advance: Callable[[int, int | None], None]
) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    for done, row in enumerate(rows, start=1):
        yield row
        advance(done, total)
