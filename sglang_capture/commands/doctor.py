"""`sglang-capture doctor`: what is installed, what would be hooked, and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    server: Annotated[
        str | None, typer.Option(help="Address of the SGLang server; by default as its plugin says.")
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Address of the side service; by default http://127.0.0.1:30080.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Directory or Hub name of a model: show what would be captured.")
    ] = None,
    spool: Annotated[
        Path | None, typer.Option(envvar="SGLANG_CAPTURE_DIR", help="The spool; by default /dev/shm/sglang_capture.")
    ] = None,
    no_self_test: Annotated[
        bool, typer.Option("--no-self-test", help="Only look; do not have the server capture two prompts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what could be wrong, and say what to do about it.

    ✓ is well, ! may be meant so (a server that does not run yet), ✗ is wrong. Exit code 1 if anything is wrong.
    An address that you name must answer. A server that you name is also tried out: two prompts are captured, looked
    at and removed again, and you read whether its captures can be trusted.

    Example: sglang-capture doctor --server http://127.0.0.1:30000
    """
    from sglang_capture.commands._checks import run_checks
    from sglang_capture.commands._output import print_json, say
    from sglang_capture.commands._signals import exit_on_sigterm

    exit_on_sigterm()  # a probe that was sent must not stay in the spool
    checks = []
    for check in run_checks(server=server, service=service, model=model, spool=spool, self_test=not no_self_test):
        checks.append(check)
        if not as_json:
            say(check.line(), check.state)
    wrong = any(check.state == "wrong" for check in checks)
    if as_json:
        print_json({"ok": not wrong, "checks": [check.as_dict() for check in checks]})
    raise typer.Exit(1 if wrong else 0)
