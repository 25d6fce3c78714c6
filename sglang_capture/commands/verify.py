"""`sglang-capture verify`: are the captures what transformers, or a second server, computes?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_capture.commands._output import human_bytes, plural, print_json, progress_bar, say
from sglang_capture.names import check_place

if TYPE_CHECKING:
    from sglang_capture.comparison import Difference, KindReport
    from sglang_capture.verify import VerifyReport

_TRANSFORMERS = "With transformers"
_SERVER = "With a second server"


def verify(
    path: Annotated[Path, typer.Argument(help="A dataset, a spool, one dump (.pt), or an export.")],
    sample: Annotated[int, typer.Option(min=1, help="How many captures to recompute.")] = 8,
    seed: Annotated[int, typer.Option(help="Which ones: the same seed takes the same captures.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Allowed relative error of a row; by default what the precision allows."),
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="First read every byte of a dataset or an export.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Where the weights are; as the captures say by default.", rich_help_panel=_TRANSFORMERS),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="In which it computes: float32, bfloat16, float16.", rich_help_panel=_TRANSFORMERS)
    ] = "float32",
    device: Annotated[
        str, typer.Option(help="Where it computes: cpu, cuda, or auto.", rich_help_panel=_TRANSFORMERS)
    ] = "cpu",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=_TRANSFORMERS),
    ] = False,
    with_server: Annotated[
        str | None,
        typer.Option(
            help="Address of a second SGLang server with this plugin and the same model, best in float32: "
            "it computes the prompts again, and transformers is not needed.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(
            envvar="SGLANG_CAPTURE_DIR",
            help="That server's spool; by default /dev/shm/sglang_capture.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
) -> None:
    """Recompute a sample of captures, with transformers or on a second server, and tell the worst error of each kind of
    row, and where it first differs.

    Exits with 1 where a row is further off than its precision allows, and says what it looks like instead.

    Example: `sglang-capture verify captures --sample 16`
    """
    check_place(model, "--model")
    from sglang_capture.commands._signals import exit_on_sigterm
    from sglang_capture.errors import UsageError
    from sglang_capture.spool import DEFAULT_DIRECTORY
    from sglang_capture.verify import verify_dataset, verify_with_server

    exit_on_sigterm()  # what a second server was asked for must not stay in its spool
    if with_server is not None and model is not None:
        raise UsageError(
            "--model is what transformers loads, and --with-server asks a server instead: name one of them"
        )
    if with_server is not None and spool is not None and not spool.is_dir():
        raise UsageError(f"there is no directory {spool}; --spool takes the spool of the server at {with_server}")
    checked = _check_files(path, checksums)
    with progress_bar("Recomputing") as progress:
        if with_server is None:
            report = verify_dataset(
                path,
                model=model,
                sample=sample,
                seed=seed,
                dtype=dtype,
                device=device,
                tolerance=tolerance,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
        else:
            report = verify_with_server(
                path,
                with_server,
                spool or DEFAULT_DIRECTORY,
                sample=sample,
                seed=seed,
                tolerance=tolerance,
                progress=progress,
            )
    if as_json:
        print_json({**report.model_dump(mode="json"), "checksums": checked})
    else:
        if checked is not None:
            size = human_bytes(checked["bytes"])
            say(f"{plural(checked['files'], 'file')} ({size}): every byte is as it was written", "ok")
        print_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _check_files(path: Path, checksums: bool) -> dict[str, int] | None:
    """The files and bytes whose checksums were compared, if that was asked for.

    Raises:
        UsageError: there are no checksums.
        DatasetError, ExportError: a file is not as it was written.
    """
    from sglang_capture.errors import UsageError
    from sglang_capture.export.folder import read_lineage
    from sglang_capture.export.integrity import check_export
    from sglang_capture.shards import check_dataset
    from sglang_capture.shards.manifest import MANIFEST_NAME

    if read_lineage(path) is not None:
        sizes = [record.bytes for record in check_export(path)] if checksums else []
    elif (path / MANIFEST_NAME).exists():
        sizes = [entry.bytes for entry in check_dataset(path, deep=checksums).shards]
    elif checksums:
        raise UsageError(f"{path} is no dataset and no export: only these have checksums, drop --checksums")
    return {"files": len(sizes), "bytes": sum(sizes)} if checksums else None


def print_report(report: VerifyReport) -> None:
    """The report as people read it."""
    from rich.console import Console
    from rich.table import Column, Table

    # Numbers stay whole; what is too long beside them goes on in the next line, and is never cut.
    columns = [Column(name, no_wrap=True) for name in ("rows", "worst", "middle")]
    columns += [Column(name, overflow="fold", min_width=len(name)) for name in ("worst row", "verdict")]
    table = Table(*columns, box=None, pad_edge=False, collapse_padding=True)
    for kind in report.kinds:
        verdict = "ok" if kind.ok else f"wrong: looks like {kind.looks_like}" if kind.looks_like else "wrong"
        table.add_row(
            kind.name,
            f"{kind.worst_error:.1e} of {kind.allowed_worst:.0e}",
            f"{kind.middle_error:.1e} of {kind.allowed_middle:.0e}",
            f"{kind.sample_id}:{kind.row}",
            verdict,
        )
    Console().print(table)
    if report.with_media:
        say(f"passed by {plural(report.with_media, 'capture')} with images or sound: they cannot be recomputed", "warn")
    if report.labelled:
        say(f"passed by {plural(report.labelled, 'capture')} labelled to have NaN or Inf", "warn")
    if report.reference_nonfinite:
        found = plural(report.reference_nonfinite, "capture")
        say(f"passed by {found} for which {report.model} itself gives NaN or Inf in {report.oracle_dtype}", "warn")
    for kind in report.kinds:
        if kind.first_difference is not None:
            say(_where(kind, kind.first_difference))
    if report.first_difference is not None:
        say(f"it first differs at {_place(report.first_difference)}", "wrong")
    compared = f"{plural(report.samples, 'capture')} ({plural(report.tokens, 'token')}, {report.dtype})"
    verdict = "every kind of row is right" if report.ok else "some rows are wrong"
    say(f"{compared} against {report.model} in {report.oracle_dtype}: {verdict}", "ok" if report.ok else "wrong")


def _where(kind: KindReport, first: Difference) -> str:
    allowed = "nearer to another state" if first.allowed is None else f"{first.allowed:.0e} is allowed"
    return (
        f"{kind.name}: {kind.rows_off:,} of {plural(kind.rows, 'row')} differ, first at position {first.position} of "
        f"{first.sample_id} (error {first.error:.1e}, {allowed})"
    )


def _place(first: Difference) -> str:
    return f"{first.name}, position {first.position} of {first.sample_id} (token {first.token_id})"
