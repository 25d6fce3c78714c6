"""A real SGLang server on the CPU, for the length of a ``with`` block."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from sglang_capture_patches import cpu

from engine.nursery import Nursery, outer_environment

CPU_PLUGIN = "sglang_capture_cpu"
_ANSWER_TIMEOUT = 600
_TAIL = 8000


class EngineServer:
    """``python -m sglang_capture_patches.cpu`` in a process group of its own; what it does is done without importing
    anything again (:mod:`engine.nursery`), unless it is to be ``fresh``.

    ``plugins`` becomes ``SGLANG_PLUGINS``; the launcher adds the test bed's own. Variables of ``SGLANG_CAPTURE_*`` that
    the tests themselves run under do not reach the server: give in ``env`` what it shall see.

        with EngineServer(model, "--chunked-prefill-size", "64", plugins="sglang_capture",
                          env={"SGLANG_CAPTURE_DIR": str(spool)}) as server:
            server.generate(input_ids, max_new_tokens=4, custom_params={"capture": "one"})
    """

    def __init__(
        self,
        model_dir: Path | str,
        *arguments: str,
        plugins: str = CPU_PLUGIN,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 600,
        fresh: bool = False,
    ) -> None:
        self._arguments = ["--model-path", str(model_dir), *arguments]
        self._fresh = fresh
        self._env = {**outer_environment(), "SGLANG_PLUGINS": plugins, **(env or {})}
        self._start_timeout = start_timeout
        self._process: psutil.Process | None = None
        self._log = Path()
        self._http = httpx.Client(timeout=_ANSWER_TIMEOUT, trust_env=False)
        self.url = ""

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def start(self) -> EngineServer:
        """Start it, and come back when it answers; where it does not, raise with the end of its log."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        descriptor, name = tempfile.mkstemp(prefix="engine-server-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        arguments = [*self._arguments, "--port", str(port)]
        self._process = self._spawn(arguments) if self._fresh else self._fork(arguments)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _spawn(self, arguments: list[str]) -> psutil.Process:
        with self._log.open("ab") as log:
            return psutil.Popen(
                [sys.executable, "-m", "sglang_capture_patches.cpu", *arguments],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _fork(self, arguments: list[str]) -> psutil.Process:
        environment = cpu.environment_of(arguments, self._env)
        return nursery().fork([*arguments, *cpu.defaults_for(arguments)], environment, self._log)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            if not self.alive:
                raise RuntimeError(f"the server ended while it started; its log ends:\n{self.log_text()[-_TAIL:]}")
            try:
                if self._http.get(f"{self.url}/health", timeout=10).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.2)
        raise TimeoutError(f"no answer in {self._start_timeout:g} s; the log ends:\n{self.log_text()[-_TAIL:]}")

    def post(self, path: str, json: Any) -> Any:
        """The answer's JSON; an HTTP error raises with the answer's text."""
        answer = self._http.post(f"{self.url}{path}", json=json)
        if answer.is_error:
            raise RuntimeError(f"POST {path}: {answer.status_code}: {answer.text[:2000]}")
        return answer.json()

    def control(self, route: str, **body: Any) -> int:
        """POST and return the status code, whatever it is: what is asked may be too late, or end a request."""
        return self._http.post(f"{self.url}/{route}", json=body).status_code

    def get(self, path: str) -> Any:
        return self._http.get(f"{self.url}{path}").raise_for_status().json()

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        request: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Any:
        """``/generate``, greedy unless ``sampling`` says otherwise; ``request`` holds keys beside it, as ``rid``."""
        parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1, **sampling}
        return self.post("/generate", {"input_ids": input_ids, "sampling_params": parameters, **(request or {})})

    def log_text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.is_file() else ""

    def stop(self) -> None:
        """Ask it to end, and see to it that it did, with all its processes."""
        if self._process is not None and self.alive:
            self._process.terminate()
            with suppress(psutil.TimeoutExpired):  # what is left is killed now
                self._process.wait(timeout=20)
        self.kill()
        self._http.close()
        self._log.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL for the whole group, as the kernel's out-of-memory killer would; the log stays readable."""
        if self._process is None:
            return
        deadline = time.monotonic() + 30
        while members := _group(self.pid):
            for member in members:
                _send_kill(member)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes survive SIGKILL: {members}")
            time.sleep(0.05)
        self._process.wait()


@cache
def nursery() -> Nursery:
    """One for the whole run."""
    made = Nursery()
    atexit.register(made.close)
    return made


def _free_port() -> int:
    """Below the ports that the system itself gives out: SGLang derives others from it, some hundred above."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _group(leader: int) -> list[int]:
    """Living members of the process group: a zombie counts as dead."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def _send_kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(pid, signal.SIGKILL)
