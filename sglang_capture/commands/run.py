"""`sglang-capture run`: captures the conversations of a file or dataset, through the side service."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_capture.commands._rows import Column, File, MaxLength, OnlyLastTurn, RowOptions, Split, Subset
from sglang_capture.names import check_place


def run(
    file: File,
    service: Annotated[str, typer.Option(help="Address of the side service.")] = "http://127.0.0.1:30080",
    api_key: Annotated[
        str | None, typer.Option(envvar="SGLANG_CAPTURE_API_KEY", help="The service's key, if it has one.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Hidden-state indices, like 3,31,59; by default as the server is set.")
    ] = None,
    last_hidden: Annotated[
        str | None, typer.Option(help="Last hidden state: none, post, pre or both; by default as the server is set.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Conversations in flight.")] = 32,
    tokenizer: Annotated[
        str | None, typer.Option(help="Lays out messages: a directory or a Hub name; by default the server's.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the tokenizer run code that comes with it.")
    ] = False,
    column: Column = None,
    split: Split = None,
    subset: Subset = None,
    max_length: MaxLength = None,
    only_last_turn: OnlyLastTurn = False,
    generate: Annotated[
        bool, typer.Option("--generate", help="Have the target write the answers first, and capture those.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="With --generate: most tokens of one answer.")] = 4096,
    temperature: Annotated[float, typer.Option(min=0, help="With --generate: 0 takes the likeliest token.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=0, help="Give up after so many seconds without any progress; a big model takes long to restart."
        ),
    ] = 900,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Capture the conversations of a file, or of a Hugging Face dataset.

    Shows progress, tries again what may mend, and can be stopped and started at will: what was captured is not captured
    twice. A bad row is named and costs only itself. Exit code 1 if anything is missing at the end.

    Example: sglang-capture run train.jsonl --layers 3,31,59

    Example: sglang-capture run hf:HuggingFaceH4/ultrachat_200k:train_sft --column messages --max-length 4096

    Example: sglang-capture run train.jsonl --generate --temperature 0.7
    """
    check_place(tokenizer, "--tokenizer")
    from sglang_capture.commands._run import RunOptions, run_file
    from sglang_capture.prompts import Layout

    options = RunOptions(
        rows=RowOptions(file, column, split, subset),
        service=service,
        api_key=api_key,
        layers=layers,
        last_hidden=last_hidden,
        concurrency=concurrency,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        layout=Layout(max_length, only_last_turn),
        generate={"max_new_tokens": max_new_tokens, "temperature": temperature} if generate else None,
        limit=limit,
        patience=patience,
        as_json=as_json,
    )
    raise typer.Exit(run_file(options))
