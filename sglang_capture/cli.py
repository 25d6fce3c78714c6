"""The command `sglang-capture`.

Each command is a function in a module of its own below :mod:`sglang_capture.commands`. These modules import what is
heavy (torch, transformers, FastAPI) inside their functions, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from sglang_capture.commands.check_draft import check_draft
from sglang_capture.commands.demo import demo
from sglang_capture.commands.doctor import doctor
from sglang_capture.commands.estimate import estimate
from sglang_capture.commands.export import export
from sglang_capture.commands.pack import pack
from sglang_capture.commands.plan import plan
from sglang_capture.commands.prepare import prepare
from sglang_capture.commands.run import run
from sglang_capture.commands.serve import serve
from sglang_capture.commands.tiny_model import tiny_model
from sglang_capture.commands.verify import verify
from sglang_capture.errors import CaptureError, UsageError

app = typer.Typer(
    name="sglang-capture",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(serve)
app.command("run")(run)
app.command("prepare")(prepare)
app.command("pack")(pack)
app.command("export")(export)
app.command("verify")(verify)
app.command("estimate")(estimate)
app.command("check-draft")(check_draft)
app.command("plan")(plan)
app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("tiny-model")(tiny_model)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"sglang-capture {version('sglang-capture')}")
        raise typer.Exit


@app.callback()
def _top(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turns a stock SGLang server into a source of hidden states for training draft models.

    Exit codes: 0 good, 1 failed, 2 used wrongly.
    """


def main() -> None:
    """The entry point: an error that is for the user is printed without a traceback."""
    try:
        app()
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        if "--json" in sys.argv[1:]:
            print(json.dumps({"ok": False, "error": str(error)}))
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """2 for what was asked wrongly, 1 for what failed, ``None`` for a fault of ours.

    The modules that define these errors import torch: if one was raised, that has happened already.
    """
    if isinstance(error, CaptureError):
        return 2 if isinstance(error, UsageError) else 1
    from sglang_capture.dump import DumpError
    from sglang_capture.layers import LayerError
    from sglang_capture.mark import MarkError
    from sglang_capture.quota import QuotaError
    from sglang_capture.settings import SettingsError
    from sglang_capture.spec import SpecError
    from sglang_capture.spool import SpoolError

    if isinstance(error, (LayerError, MarkError, QuotaError, SettingsError)):
        return 2
    return 1 if isinstance(error, (DumpError, SpecError, SpoolError)) else None
