"""`sglang-capture plan`: from a draft to the settings that capture for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_capture.names import check_place


def plan(
    draft: Annotated[str, typer.Argument(help="The draft: a directory with its config.json, or a Hub name.")],
    model: Annotated[str, typer.Option(help="The target: a directory or a Hub name.")],
    file: Annotated[
        str | None, typer.Option(help="A file or dataset, as `run` takes it: its tokens are counted for the disk.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Without --file: how many samples.")] = None,
    tokens_per_sample: Annotated[
        int | None, typer.Option(min=1, help="Without --file: tokens of a sample, on average.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="Who trains it, if the config does not tell, for example SpecForge.")
    ] = None,
    sglang_version: Annotated[
        str | None, typer.Option(help="The SGLang that captures and serves; by default the newest that is known.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --file: let the tokenizer run code that comes with it.")
    ] = False,
    data: Annotated[
        Path, typer.Option(envvar="SGLANG_CAPTURE_DATA", help="Where the service would keep its datasets.")
    ] = Path("captures"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The settings with which captures of a target fit a draft.

    Exit code 1 if it cannot be told which, if draft, target and trainer contradict each other, or if the disk cannot
    hold the captures.

    Example: sglang-capture plan my-draft --model moonshotai/Kimi-K2.5 --samples 100000 --tokens-per-sample 1500
    """
    check_place(draft, "DRAFT")
    check_place(model, "--model")
    from sglang_capture.commands._plan import PlanOptions, run_plan

    options = PlanOptions(
        draft=draft,
        model=model,
        file=file,
        samples=samples,
        tokens_per_sample=tokens_per_sample,
        trainer=trainer,
        sglang_version=sglang_version,
        trust_remote_code=trust_remote_code,
        data=data,
    )
    raise typer.Exit(run_plan(options, as_json=as_json))
