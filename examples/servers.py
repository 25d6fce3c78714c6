"""The servers of the examples: stock SGLang on the test bed, with the plugin and a side service or without."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from sglang_capture.commands._processes import Background, free_port

_START_SECONDS = 900


@contextlib.contextmanager
def engine(model: Path, log: Path, *arguments: str | Path, spool: Path | None = None) -> Iterator[str]:
    """Stock SGLang, with the plugin if it is given a spool; its URL once it answers."""
    port = free_port()
    words = [sys.executable, "-m", "sglang_capture_patches.cpu", "--model-path", model, "--port", port, *arguments]
    variables = {"SGLANG_PLUGINS": "sglang_capture" if spool else "sglang_capture_cpu"}
    if spool:
        variables["SGLANG_CAPTURE_DIR"] = str(spool)
    with Background("SGLang", [str(word) for word in words], log, variables) as process:
        url = f"http://127.0.0.1:{port}"
        _until_healthy(f"{url}/health", process)
        yield url


@contextlib.contextmanager
def capturing(model: Path, out: Path) -> Iterator[str]:
    """A server with the plugin, and the side service beside it, which keeps its data in ``out/captures``; its URL."""
    spool = Path(tempfile.mkdtemp(prefix="sglang_capture_example-", dir="/dev/shm")) / "spool"
    port = free_port()
    serve = ["serve", "--spool", spool, "--data", out / "captures", "--port", port]
    words = [sys.executable, "-m", "sglang_capture", *map(str, serve)]
    try:
        with (
            engine(model, out / "capturing.log", spool=spool),
            Background("the side service", words, out / "service.log") as service,
        ):
            url = f"http://127.0.0.1:{port}"
            _until_healthy(f"{url}/health", service)
            yield url
    finally:
        shutil.rmtree(spool.parent, ignore_errors=True)


def packed(service: str, out: Path) -> Path:
    """Have the service pack what it has not yet; the dataset's directory."""
    httpx.post(f"{service}/capture/shards", timeout=600).raise_for_status()
    (dataset,) = (out / "captures").glob("dataset-*")
    return dataset


def _until_healthy(url: str, process: Background) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=30).status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"{process.name} did not answer within {_START_SECONDS} s; its log is {process.log}")
