"""`sglang-capture tiny-model`: a small random DeepSeek-V3, to try things out with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tiny_model(
    directory: Annotated[Path, typer.Argument(help="Where to write it; made if it is not there.", metavar="DIR")],
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 61,
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 16.")] = 128,
    seed: Annotated[int, typer.Option(help="Another seed gives other weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="The weights' type: float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Say what was made as JSON.")] = False,
) -> None:
    """Make a small random DeepSeek-V3 with a tokenizer and a chat template.

    SGLang serves it and transformers loads it, without a download; the same arguments give the same bytes.

    Example: sglang-capture tiny-model ./tiny --layers 61
    """
    from sglang_capture.commands._output import human_bytes, print_json, say
    from sglang_capture.errors import UsageError
    from sglang_capture.tiny_model import make_tiny_model

    try:
        make_tiny_model(directory, layers=layers, hidden=hidden, seed=seed, dtype=dtype)
    except (ValueError, FileExistsError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror}; name another directory") from error
    size = sum(file.stat().st_size for file in directory.iterdir())
    if as_json:
        print_json({"directory": str(directory), "bytes": size, "layers": layers, "hidden": hidden, "seed": seed})
        return
    say(f"{directory}: {layers} layers, hidden size {hidden}, {dtype}, {human_bytes(size)}", "ok")
    say(f"Serve it on a machine without a GPU: python -m sglang_capture_patches.cpu --model-path {directory}")
