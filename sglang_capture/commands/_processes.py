"""The processes of a demo: started in groups of their own, and surely gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from sglang_capture.errors import CaptureError

_GRACE_SECONDS = 15


class Background:
    """A command that runs for the length of a ``with`` block, its output in a log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raises CaptureError, with the end of the log, if the process has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise CaptureError(f"{self.name} ended by itself; its log ({self.log}) ends:\n{tail}")

    def stop(self) -> None:
        """SIGTERM for the process, then SIGKILL for whatever of its group is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed with the rest
                self._process.wait(_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def own_command(*arguments: str) -> list[str]:
    """One of our own commands, in this same environment."""
    return [sys.executable, "-m", "sglang_capture", *arguments]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
