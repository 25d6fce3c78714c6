"""`sglang-capture estimate`: what a run would take, before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_capture.commands._rows import Column, File, RowOptions, Split, Subset
from sglang_capture.names import check_place


def estimate(
    file: File,
    model: Annotated[str | None, typer.Option(help="Directory or Hub name of the model.")] = None,
    service: Annotated[
        str | None, typer.Option(help="Address of a side service: take the model, spool and disk that it uses.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Hidden-state indices, like 3,31,59; by default as a server has them.")
    ] = None,
    last_hidden: Annotated[
        str | None, typer.Option(help="Last hidden state: none, post, pre or both; by default as a server has it.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Counts the tokens: a directory or a Hub name; by default the model's.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the tokenizer run code that comes with it.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Tokenize only so many rows, drawn at random, and scale up.")
    ] = None,
    column: Column = None,
    split: Split = None,
    subset: Subset = None,
    spool: Annotated[
        Path | None, typer.Option(envvar="SGLANG_CAPTURE_DIR", help="The spool; by default /dev/shm/sglang_capture.")
    ] = None,
    data: Annotated[
        Path, typer.Option(envvar="SGLANG_CAPTURE_DATA", help="Where the service would keep its datasets.")
    ] = Path("captures"),
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Tokens and bytes that a run would take, against the room there is.

    The disk must hold all of it. The spool need not: it only holds what is not packed yet, but the longest conversation
    must fit. Exit code 1 if one of the two is not so.

    Example: sglang-capture estimate train.jsonl --model moonshotai/Kimi-K2.5 --trust-remote-code --sample 2000
    """
    for option, name in (("--model", model), ("--tokenizer", tokenizer)):
        check_place(name, option)
    from sglang_capture.commands._estimate import EstimateOptions, run_estimate

    options = EstimateOptions(
        rows=RowOptions(file, column, split, subset),
        model=model,
        service=service,
        layers=layers,
        last_hidden=last_hidden,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        sample=sample,
        spool=spool,
        data=data,
    )
    raise typer.Exit(run_estimate(options, as_json=as_json))
