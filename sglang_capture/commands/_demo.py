"""What `demo` does, step by step: model, server, service, run, pack, export, verify, and a table of it all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_capture.client import ServiceClient, ServiceUnreachable
from sglang_capture.commands._output import error_console, human_bytes, print_facts, print_json, say
from sglang_capture.commands._processes import Background, free_port, own_command
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.export import export_dataset
from sglang_capture.shards import CaptureDataset
from sglang_capture.tiny_model import make_tiny_model
from sglang_capture.verify import verify_dataset

_MARKER = ".sglang-capture-demo"
_START_SECONDS = 600
_VERIFIED = 4


@dataclass(frozen=True)
class DemoOptions:
    """The options of `demo`."""

    out: Path
    layers: int
    limit: int | None
    as_json: bool


def run_demo(options: DemoOptions) -> int:
    """Run the demo; the exit code.

    Raises:
        CaptureError: a step failed; the message has the end of the log that tells why.
    """
    _check_installed()
    out = _fresh_directory(options.out)
    _step(f"making a random DeepSeek-V3 of {options.layers} layers in {out / 'model'}")
    make_tiny_model(out / "model", layers=options.layers)
    with _servers(out) as service_url:
        _step("capturing the conversations that come with the package")
        summary = _capture(service_url, options.limit)
        _step("packing what is still in the spool")
        dataset = asyncio.run(_pack(service_url))
    _step("exporting for SpecForge")
    export = export_dataset(dataset, "specforge", out / "specforge")
    _step("comparing rows with Hugging Face transformers: of the dataset, and of the files written for SpecForge")
    reports = [
        verify_dataset(source, model=str(out / "model"), sample=_VERIFIED) for source in (dataset, out / "specforge")
    ]
    result = {
        "conversations": summary["captured"],
        "tokens": summary["tokens"],
        "bytes_per_token": CaptureDataset(dataset).spec.bytes_per_token,
        "tokens_per_second": summary["tokens_per_second"],
        "worst_relative_error": reports[0].worst_error,
        "compared_rows": reports[0].tokens,
        "dtype": reports[0].dtype,
        "dataset": str(dataset),
        "export": str(out / "specforge"),
        "exported": export.samples,
        "logs": str(out / "logs"),
    }
    good = not summary["missing"] and export.complete and all(report.ok for report in reports)
    if options.as_json:
        print_json({"ok": good, **result})
    else:
        _print_result(result, summary, good)
    return 0 if good else 1


def _check_installed() -> None:
    for module in ("sglang", "transformers", "sglang_capture_patches"):
        if find_spec(module) is None:
            raise UsageError(
                f"the demo runs the real engine, and {module} is not installed here: "
                "pip install 'sglang-capture[sglang,transformers]' (in a checkout: make demo)"
            )


def _fresh_directory(out: Path) -> Path:
    """An empty ``out``; an earlier demo's is emptied, anything else is left alone."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: name a new or empty directory with --out")
    if out.exists() and any(out.iterdir()):
        if not (out / _MARKER).exists():
            raise UsageError(f"{out} holds other files: name a new or empty directory with --out")
        shutil.rmtree(out)
    (out / "logs").mkdir(parents=True)
    (out / _MARKER).touch()
    return out.resolve()


@contextlib.contextmanager
def _servers(out: Path) -> Iterator[str]:
    """A server with the plugin and the side service beside it; the service's URL once both are ready."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    spool = Path(tempfile.mkdtemp(prefix="sglang_capture_demo-", dir=shared)) / "spool"
    engine_port, service_port = free_port(), free_port()
    engine_env = {"SGLANG_PLUGINS": "sglang_capture", "SGLANG_CAPTURE_DIR": str(spool)}
    service_command = own_command(
        "serve", "--spool", str(spool), "--data", str(out / "captures"), "--port", str(service_port)
    )
    try:
        with (
            Background(
                "SGLang", _engine_command(out / "model", engine_port), out / "logs/sglang.log", engine_env
            ) as engine,
            Background("the side service", service_command, out / "logs/service.log") as service,
        ):
            _step("starting SGLang with SGLANG_PLUGINS=sglang_capture, and the side service; this takes a minute")
            url = f"http://127.0.0.1:{service_port}"
            asyncio.run(_until_ready(url, engine, service))
            yield url
    finally:
        shutil.rmtree(spool.parent, ignore_errors=True)


def _engine_command(model: Path, port: int) -> list[str]:
    """Stock SGLang: as it is on a GPU, on the test bed without one."""
    import torch

    if torch.cuda.is_available():
        # Triton's attention takes the small model's head sizes; the kernels made for the real sizes may not.
        module, extra = "sglang.launch_server", ["--dtype", "bfloat16", "--attention-backend", "triton"]
    else:
        module, extra = "sglang_capture_patches.cpu", ["--dtype", "float32"]
    return [sys.executable, "-m", module, "--model-path", str(model), "--port", str(port), *extra]


async def _until_ready(url: str, *processes: Background) -> None:
    deadline = time.monotonic() + _START_SECONDS
    async with ServiceClient(url) as client:
        while time.monotonic() < deadline:
            for process in processes:
                process.check()
            with contextlib.suppress(ServiceUnreachable):
                health = await client.health()
                if health["engine"]["reachable"] and health["plugin"] and health["plugin"]["state"] == "capturing":
                    return
            await asyncio.sleep(0.5)
    raise CaptureError(f"the servers were not ready within {_START_SECONDS} s; see {processes[0].log}")


def _capture(service_url: str, limit: int | None) -> dict[str, Any]:
    """`sglang-capture run` over the shipped conversations; its progress is shown, its summary returned."""
    with as_file(files("sglang_capture") / "data/conversations.jsonl") as conversations:
        command = own_command("run", str(conversations), "--service", service_url, "--json")
        if limit is not None:
            command += ["--limit", str(limit)]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ, check=False)
    try:
        summary: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise CaptureError(f"`sglang-capture run` ended with exit code {done.returncode}") from None
    return summary


async def _pack(service_url: str) -> Path:
    """Pack the rest; the directory of the dataset."""
    async with ServiceClient(service_url) as client:
        await client.pack()
        shards = [shard async for shard in client.shards()]
    if not shards:
        raise CaptureError("nothing was packed: no conversation was captured")
    return Path(shards[0]["path"]).parent


def _step(text: str) -> None:
    say(f"· {text}", console=error_console())


def _print_result(result: dict[str, Any], summary: dict[str, Any], good: bool) -> None:
    error = result["worst_relative_error"]
    print()
    print_facts(
        [
            ("conversations", f"{result['conversations']:,} of {summary['rows']:,}"),
            ("tokens", f"{result['tokens']:,}"),
            ("bytes per token", f"{result['bytes_per_token']:,}  ({human_bytes(summary['bytes'])} in all)"),
            ("tokens per second", f"{result['tokens_per_second']:,.0f}"),
            ("worst relative error", f"{error:.1e}  ({result['compared_rows']:,} rows of {result['dtype']} compared)"),
            ("dataset", result["dataset"]),
            ("for SpecForge", f"{result['export']}  ({result['exported']:,} samples)"),
            ("logs", result["logs"]),
        ]
    )
    print(_NEXT.format(activate=_activation()))
    if good:
        say("all of it is right", "ok")
    else:
        say("something is missing or wrong: see above, and the logs", "wrong")


def _activation() -> str:
    """The line that makes our command one of the shell, where it is none yet."""
    script = Path(sys.prefix, "bin", "activate")
    return "" if shutil.which("sglang-capture") or not script.exists() else f"  . {script}\n"


_NEXT = """
The same on your own server and data:
{activate}\
  SGLANG_PLUGINS=sglang_capture python -m sglang.launch_server --model-path MODEL …
  sglang-capture serve --data DIR
  sglang-capture run YOUR.jsonl
  sglang-capture export DIR/dataset-… --to specforge OUT
  sglang-capture verify DIR/dataset-…
"""
