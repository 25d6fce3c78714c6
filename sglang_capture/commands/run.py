"""`sglang-capture run`: captures the conversations of a JSONL file, through the side service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    file: Annotated[Path, typer.Argument(help="JSONL: messages, prompt (or text), or input_ids in each row.")],
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
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=0, help="Give up after so many seconds without any progress; a big model takes long to restart."
        ),
    ] = 900,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Capture the conversations of a JSONL file.

    Shows progress, tries again what may mend, and can be stopped and started at will: what was captured is not captured
    twice. A bad row is named and costs only itself. Exit code 1 if anything is missing at the end.

    Example: sglang-capture run train.jsonl --layers 3,31,59
    """
    from sglang_capture.commands._run import RunOptions, run_file

    options = RunOptions(
        file=file,
        service=service,
        api_key=api_key,
        layers=layers,
        last_hidden=last_hidden,
        concurrency=concurrency,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        limit=limit,
        patience=patience,
        as_json=as_json,
    )
    raise typer.Exit(run_file(options))
