"""`sglang-capture prepare`: turns conversations into ids and loss masks, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_capture.commands._rows import Column, File, MaxLength, OnlyLastTurn, RowOptions, Split, Subset
from sglang_capture.names import check_place


def prepare(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSON lines to write.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "--model", help="Directory or Hub name of the model, or of its tokenizer.")
    ],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the tokenizer run code that comes with it.")
    ] = False,
    column: Column = None,
    split: Split = None,
    subset: Subset = None,
    max_length: MaxLength = None,
    only_last_turn: OnlyLastTurn = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Print so many conversations with what is supervised marked.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
) -> None:
    """Turn conversations into token ids and loss masks that `run` sends as they are. Needs no server.

    Lays them out with the model's own chat template, as `run` would, and says how many tokens are supervised. OUT
    appears when all of it is written. Exit code 1 if a row is bad.

    Example: sglang-capture prepare train.jsonl prepared.jsonl --model Qwen/Qwen3-8B --max-length 4096 --show 2
    """
    check_place(tokenizer, "--model")
    from sglang_capture.commands._prepare import PrepareOptions, run_prepare
    from sglang_capture.prompts import Layout

    options = PrepareOptions(
        rows=RowOptions(file, column, split, subset),
        out=out,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        layout=Layout(max_length, only_last_turn),
        limit=limit,
        show=show,
    )
    raise typer.Exit(run_prepare(options, as_json=as_json))
