"""`sglang-capture pack`: a spool into a dataset, without a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pack(
    spool: Annotated[Path, typer.Argument(help="the directory with the dumps", metavar="SPOOL")],
    dataset: Annotated[Path, typer.Argument(help="the dataset to make, or to add to", metavar="DATASET")],
    ids: Annotated[list[str] | None, typer.Option("--id", help="only this capture; may be given again")] = None,
    shard_size: Annotated[str, typer.Option(help="most payload of one shard, like 1GiB")] = "1GiB",
    remove: Annotated[bool, typer.Option("--remove", help="remove each dump once it is packed")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="say what was packed as JSON")] = False,
) -> None:
    """Pack the dumps of a spool into one dataset, without a service.

    Where the side service runs it does this by itself; leave its spool to it. All dumps must have one spec. Dumps are
    kept unless `--remove` is given, and packing again goes on where it was broken off.

    Example: `sglang-capture pack /dev/shm/sglang_capture ./dataset --remove`
    """
    from rich.progress import Progress

    from sglang_capture.commands._output import error_console, human_bytes, plural, print_json, say
    from sglang_capture.packing import pack_spool

    console = error_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing")
        summary = pack_spool(
            spool,
            dataset,
            ids=ids,
            most_bytes=_size(shard_size),
            remove=remove,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json(
            {
                "dataset": str(dataset),
                "samples": summary.samples,
                "shards": [entry.model_dump() for entry in summary.shards],
                "already": summary.already,
                "skipped": summary.skipped,
            }
        )
    else:
        for entry in summary.shards:
            samples, tokens = plural(entry.samples, "sample"), plural(entry.tokens, "token")
            say(f"{dataset / entry.file}: {samples}, {tokens}, {human_bytes(entry.bytes)}", "ok")
        if summary.already:
            say(f"{plural(len(summary.already), 'capture')} were in the dataset already")
        for capture_id, reason in summary.skipped.items():
            say(f"{capture_id}: {reason}", "wrong")
    raise typer.Exit(1 if summary.skipped else 0)


def _size(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from sglang_capture.errors import UsageError

    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise UsageError(f"--shard-size must be a size like 1GiB or 500MB; found {text!r}") from None
