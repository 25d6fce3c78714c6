"""Ending in good order when somebody else says so."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn


def exit_on_sigterm() -> None:
    """Have SIGTERM unwind this process as Ctrl-C does, so that it removes what it has put anywhere; exit code 143."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # the next one ends it at once
    raise SystemExit(128 + number)
