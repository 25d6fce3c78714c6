"""`sglang-capture demo`: the main job on this machine, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path, typer.Option(help="Where everything is put; an earlier demo there is replaced.", metavar="DIR")
    ] = Path("demo-out"),
    layers: Annotated[int, typer.Option(min=3, max=128, help="Decoder layers of the model that is made.")] = 61,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many of the 64 conversations.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run everything once: a real SGLang server with the plugin on a small model, the side service, a capture run,
    shards, an export for SpecForge, and a comparison with transformers.

    Nothing is downloaded. Without a GPU the server runs on the CPU test bed. Takes a few minutes.

    Example: sglang-capture demo
    """
    from sglang_capture.commands._demo import DemoOptions, run_demo

    raise typer.Exit(run_demo(DemoOptions(out=out, layers=layers, limit=limit, as_json=as_json)))
