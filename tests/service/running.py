"""A service that runs: in a thread of the test, or as a process that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from sglang_capture.service.server import ServiceServer
from sglang_capture.service.settings import ServiceSettings

PATIENCE = 30.0
"""Seconds until what must come is given up; never what a test measures."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition, and return what it gave."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"this never came: {what}")


@contextlib.contextmanager
def serving(directory: Path, **settings: Any) -> Iterator[httpx.Client]:
    """A service in a thread, on a free port, with its spool and data below ``directory``; gives a client of it."""
    fields = {"port": 0, "dir": directory / "spool", "data": directory / "data", "pack_age": 1e9, **settings}
    server = ServiceServer(ServiceSettings(**fields))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the start of the service")
        with httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as client:
            yield client
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the service does not stop"


class ServiceProcess:
    """A service as a process of its own; ``code`` runs in it before it serves, to have it die at a chosen place."""

    def __init__(self, directory: Path, code: str = "", **environment: str):
        program = (
            f"{code}\n"
            "from sglang_capture.service.server import ServiceServer\n"
            "from sglang_capture.service.settings import ServiceSettings\n"
            "server = ServiceServer(ServiceSettings())\n"
            "print(server.url, flush=True)\n"
            "server.run()\n"
        )
        variables = {
            "PORT": "0",
            "DIR": str(directory / "spool"),
            "DATA": str(directory / "data"),
            "PACK_AGE": "1e9",
            **environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **{f"SGLANG_CAPTURE_{name}": value for name, value in variables.items()}},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        self.client = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)
        until(self._answers, "an answer of the service")

    def kill(self) -> None:
        """kill -9"""
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        status = self.process.wait(PATIENCE)
        self.client.close()
        return status

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get("/health").is_success
        return False
