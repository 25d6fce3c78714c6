"""`sglang-capture export`: a dataset as a trainer reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_capture.commands._output import error_console, human_bytes, plural, print_json, progress_bar, say
from sglang_capture.errors import UsageError

if TYPE_CHECKING:
    from sglang_capture.export import ExportSummary

_SHOWN = 10
"""Skipped samples that are printed one by one; --json has all of them."""


def export(
    dataset: Annotated[Path, typer.Argument(help="The dataset: the directory that holds manifest.json.")],
    out: Annotated[Path, typer.Argument(help="Where to write: a new or empty folder, or one of the same export.")],
    to: Annotated[str, typer.Option("--to", help="The format, for example specforge; docs/export.md has all of them.")],
    ids: Annotated[
        str | None, typer.Option(help="Only these samples: ids with commas between, or @FILE with one id a line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a dataset in a trainer's own format.

    Run it again after an interruption, or when the dataset has grown: files whose content is proven are kept.

    Example: `sglang-capture export captures --to specforge captures-specforge`
    """
    from sglang_capture.export import export_dataset

    with progress_bar("Exporting") as progress:
        summary = export_dataset(dataset, to, out, ids=_ids(ids), progress=progress)
    if as_json:
        print_json(summary)
    else:
        _print(summary)
    if not summary.complete:
        raise typer.Exit(1)


def _ids(text: str | None) -> list[str] | None:
    if text is None:
        return None
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").replace("\n", ",")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--ids {text}: expected a text file with one sample id a line, found {error}") from error
    ids = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not ids:
        raise UsageError("--ids names no sample: give ids with commas between, or @FILE with one id a line")
    return ids


def _print(summary: ExportSummary) -> None:
    kept = summary.samples - summary.written
    say(
        f"{plural(summary.samples, 'sample')} in {summary.out} for {summary.format}: {summary.written:,} written, "
        f"{kept:,} kept, {human_bytes(summary.bytes)}",
        "ok" if summary.complete else "",
    )
    for note in summary.notes:
        say(f"note: {note}")
    console = error_console()
    for skip in summary.skipped[:_SHOWN]:
        say(f"skipped {skip.sample_id}: {skip.reason}", "wrong", console=console)
    if summary.skipped:
        say(f"{plural(len(summary.skipped), 'sample')} skipped: capture them again", "wrong", console=console)
