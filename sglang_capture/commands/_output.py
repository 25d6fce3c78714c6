"""How commands speak: results on stdout (as lines, or as JSON for machines), progress and remarks on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
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

from sglang_capture.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

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
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for the work done and the work in all; a bar on standard error where that is a terminal."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = error_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def lines_with_progress(file: Path, what: str) -> Iterator[bytes]:
    """The lines of a file, with a bar on a terminal that shows how much of it was read.

    Raises:
        UsageError: it cannot be opened.
    """
    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    try:
        lines = file.open("rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; name a JSONL file") from error
    with lines, Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=file.stat().st_size)
        for line in lines:
            progress.advance(task, len(line))
            yield line
