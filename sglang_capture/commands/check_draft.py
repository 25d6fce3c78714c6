"""`sglang-capture check-draft`: will a draft be fed what it was trained on?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_capture.commands._output import print_json, say
from sglang_capture.names import check_place

if TYPE_CHECKING:
    from sglang_capture.drafts.check import CheckReport


def check_draft(
    draft: Annotated[str, typer.Argument(help="The draft: a directory with its config.json, or a Hub name.")],
    dataset: Annotated[Path, typer.Argument(help="The dataset, or an export of it, that it is trained on.")],
    sglang_version: Annotated[
        str | None, typer.Option(help="The SGLang that will serve it; by default the one that captured.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="Who trains it, if the config does not tell, for example SpecForge.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Will SGLang feed a draft the hidden states that a dataset trained it on?

    Reads the draft's config, the shapes of its weights if they are there, and what the dataset was captured with; works
    out what SGLang makes of the draft's layer ids for this target, and says what is the same and what is not. Exit
    code 1 if something differs or cannot be told.

    Example: `sglang-capture check-draft my-draft captures`
    """
    check_place(draft, "DRAFT")
    from sglang_capture.commands._draft import check_trainer, check_version, read_captured, read_draft
    from sglang_capture.drafts.check import check_draft as compare

    check_trainer(trainer)
    check_version(sglang_version)
    spec, exported = read_captured(dataset)
    report = compare(read_draft(draft), spec, version=sglang_version or "", trainer=trainer or exported or None)
    if as_json:
        print_json({**report.model_dump(mode="json"), "fits": report.fits})
    else:
        _print(report)
    if not report.fits:
        raise typer.Exit(1)


def _print(report: CheckReport) -> None:
    marks = {"same": "ok", "different": "wrong", "unknown": "warn"}
    for finding in report.findings:
        if finding.state == "same":
            say(f"{finding.what}: {finding.found}", "ok")
            continue
        say(f"{finding.what}: expected {finding.expected}; found {finding.found}", marks[finding.state])
        say(f"  {finding.remedy}")
    served = f"SGLang {report.sglang_version or '(version not recorded)'}"
    if report.fits:
        say(f"the draft fits: {served} feeds it what the dataset holds", "ok")
        return
    bad = sum(finding.state == "different" for finding in report.findings)
    unknown = sum(finding.state == "unknown" for finding in report.findings)
    say(f"the draft does not fit, served by {served}: {bad} different, {unknown} not to be told", "wrong")
