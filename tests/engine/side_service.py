"""The side service beside a real engine, and the commands that talk to it, as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from sglang_capture.commands._processes import Background, free_port, own_command
from sglang_capture.shards import CaptureDataset


class Service(Background):
    """The side service on a data directory of its own, as a process."""

    def __init__(self, spool: Path, data: Path, **env: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.data = data
        data.mkdir(exist_ok=True)
        command = own_command("serve", "--spool", str(spool), "--data", str(data), "--port", str(port))
        super().__init__(
            "the side service", command, data / "service.log", {"SGLANG_CAPTURE_APPEAR_SECONDS": "60", **env}
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            self.check()
            try:
                health = httpx.get(f"{self.url}/health", timeout=10, trust_env=False).json()
                if health["engine"]["reachable"] and health["plugin"]["state"] == "capturing":
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.1)
        raise TimeoutError(f"not ready: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(own_command(*map(str, arguments)), capture_output=True, text=True, timeout=300, check=False)


def run(file: Path, service: Service, *more: str) -> tuple[int, dict[str, Any]]:
    """`sglang-capture run … --json`: its exit code and its summary."""
    done = command("run", file, "--service", service.url, "--json", *more)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def packed_samples(data: Path) -> dict[str, dict[str, Any]]:
    """Every sample of every dataset below a data directory, by id."""
    found: dict[str, dict[str, Any]] = {}
    for manifest in data.glob("dataset-*/manifest.json"):
        for sample in CaptureDataset(manifest.parent):
            assert sample["sample_id"] not in found, "a sample is there twice"
            found[sample["sample_id"]] = sample
    return found
