"""`sglang-capture verify`: are the captures what transformers computes?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_capture.commands._output import plural, print_json, progress_bar, say

if TYPE_CHECKING:
    from sglang_capture.verify import VerifyReport


def verify(
    path: Annotated[Path, typer.Argument(help="A dataset, a spool, one dump (.pt), or an export.")],
    model: Annotated[str | None, typer.Option(help="Where the weights are; as the captures say by default.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="How many captures to recompute.")] = 8,
    seed: Annotated[int, typer.Option(help="Which ones: the same seed takes the same captures.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Allowed relative error of a row; by default what the precision allows."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="In which transformers computes: float32, bfloat16, float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where it computes: cpu, cuda, or auto.")] = "cpu",
    checksums: Annotated[bool, typer.Option("--checksums", help="Read a dataset's every byte first.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Recompute a sample of captures with transformers, and tell the worst error of each kind of row.

    Exits with 1 where a row is further off than its precision allows, and says what it looks like instead.

    Example: `sglang-capture verify captures --sample 16`
    """
    from sglang_capture.shards import check_dataset
    from sglang_capture.shards.manifest import MANIFEST_NAME
    from sglang_capture.verify import verify_dataset

    if (path / MANIFEST_NAME).exists():
        check_dataset(path, deep=checksums)
    with progress_bar("Recomputing") as progress:
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
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _print(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=name != "verdict") for name in ("rows", "worst", "middle", "worst row", "verdict")]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1))
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
    compared = f"{plural(report.samples, 'capture')} ({plural(report.tokens, 'token')}, {report.dtype})"
    verdict = "every kind of row is right" if report.ok else "not what transformers computes"
    say(f"{compared} against {report.model} in {report.oracle_dtype}: {verdict}", "ok" if report.ok else "wrong")
