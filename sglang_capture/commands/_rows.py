"""The options that say where rows come from, and how they are read: the same for `run`, `prepare` and `estimate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

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


@dataclass(frozen=True)
class RowOptions:
    """Where rows come from, by the names of the options."""

    file: str
    column: str | None = None
    split: str | None = None
    subset: str | None = None

    def open(self) -> RowSource:
        """The rows. Raises UsageError: there are none of that name."""
        from sglang_capture.prompts import open_source

        return open_source(self.file, split=self.split, subset=self.subset)
