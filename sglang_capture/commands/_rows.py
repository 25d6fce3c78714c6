"""The options that say where rows come from, and how they are read: the same for `run`, `prepare` and `estimate`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_capture.errors import UsageError

if TYPE_CHECKING:
    from sglang_capture.prompts import RowSource

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="JSON lines, .json, .parquet, a directory with a Hugging Face dataset, or hf:NAME[:SPLIT]."
    ),
]
Column = Annotated[
    str | None, typer.Option(help="The column that holds the conversation or text, where rows have several.")
]
Split = Annotated[str | None, typer.Option(help="The split of a dataset that has several.")]
Subset = Annotated[str | None, typer.Option(help="The subset (configuration) of a dataset of the Hub.")]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Most tokens; a longer conversation ends with the last answer that is whole.")
]
OnlyLastTurn = Annotated[bool, typer.Option("--only-last-turn", help="Supervise only the last answer.")]

_LOOKED_AT = 10_000
"""Rows at the beginning of a source among which one has the column that is named, or none is taken to have it."""


@dataclass(frozen=True)
class RowOptions:
    """Where rows come from, by the names of the options."""

    file: str
    column: str | None = None
    split: str | None = None
    subset: str | None = None

    def open(self) -> RowSource:
        """The rows. Raises UsageError: there are none of that name, or none has the column that is named."""
        from sglang_capture.prompts import open_source

        source = open_source(self.file, split=self.split, subset=self.subset)
        if self.column is not None:
            _check_column(source, self.column)
        return source


def _check_column(source: RowSource, column: str) -> None:
    """Told once, for all rows: they would all be refused, one by one. The first row that has it ends the search."""
    found: dict[str, None] = {}
    for _, row in islice(source.rows(), _LOOKED_AT):
        if isinstance(row, dict):
            if column in row:
                return
            found.update(dict.fromkeys(row))
    if found:
        shown = ", ".join(map(repr, found))
        raise UsageError(f"--column {column}: no row of {source.name} has such a column; found {shown:.1000}")
