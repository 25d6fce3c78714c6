"""`sglang-capture export`: a dataset as a trainer reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_capture.commands._output import error_console, human_bytes, plural, print_json, progress_bar, say
from sglang_capture.commands.verify import print_report
from sglang_capture.errors import UsageError

if TYPE_CHECKING:
    from sglang_capture.export import ExportSummary
    from sglang_capture.verify import VerifyReport

_SOME = "For some formats"

_SHOWN = 10
_RECOMPUTED = 8
"""Samples that are recomputed where nothing else is said."""
"""Skipped samples that are printed one by one; --json has all of them."""


def export(
    dataset: Annotated[Path, typer.Argument(help="The dataset: the directory that holds manifest.json.")],
    out: Annotated[Path, typer.Argument(help="Where to write: a new or empty folder, or one of the same export.")],
    to: Annotated[str, typer.Option("--to", help="The format, for example specforge; docs/export.md has all of them.")],
    ids: Annotated[
        str | None, typer.Option(help="Only these samples: ids with commas between, or @FILE with one id a line.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory of the target's weights, for formats that need some of them.", rich_help_panel=_SOME
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in the draft's vocabulary: the most frequent ones.", rich_help_panel=_SOME),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="Cut longer samples to so many tokens.", rich_help_panel=_SOME)
    ] = None,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="Hidden states as float8, with a scale for each token.", rich_help_panel=_SOME),
    ] = False,
    verify_with: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Then recompute a sample of what was written, with transformers and this model."
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="How many samples --verify-with recomputes; 8 by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a dataset in a trainer's own format.

    Run it again after an interruption, or when the dataset has grown: files whose content is proven are kept.

    Example: `sglang-capture export captures --to specforge captures-specforge`
    """
    from sglang_capture.commands._model import check_loadable
    from sglang_capture.export import ExportOptions, export_dataset

    if model is not None and not Path(model).is_dir():
        raise UsageError(f"there is no directory {model}; --model takes the directory of the target's weights")
    if sample is not None and verify_with is None:
        raise UsageError("--sample is how many samples --verify-with recomputes: name its MODEL, or drop --sample")
    if verify_with is not None:
        check_loadable(verify_with, "--verify-with")
    options = ExportOptions(model=model, draft_vocab_size=draft_vocab_size, seq_length=seq_length, fp8=fp8)
    with progress_bar("Exporting") as progress:
        summary = export_dataset(dataset, to, out, ids=_ids(ids), options=options, progress=progress)
    if not as_json:
        _print(summary)
    report = (
        _verify(summary, verify_with, sample or _RECOMPUTED) if verify_with is not None and summary.samples else None
    )
    if as_json:
        print_json({**summary.model_dump(), "verification": report.model_dump(mode="json") if report else None})
    elif report is not None:
        print_report(report)
    if not summary.complete or (report is not None and not report.ok):
        raise typer.Exit(1)


def _verify(summary: ExportSummary, model: str, sample: int) -> VerifyReport:
    """Recompute what lies in the folder, read as the trainer reads it."""
    from sglang_capture.verify import verify_dataset

    with progress_bar("Recomputing") as progress:
        return verify_dataset(Path(summary.out), model=model, sample=sample, progress=progress)


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
        say(f"{plural(len(summary.skipped), 'sample')} skipped", "wrong", console=console)
