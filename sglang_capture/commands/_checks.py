"""The checks of `doctor`, in the order in which things depend on each other."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_capture import spool as spools
from sglang_capture.client import SERVICE_URL, EngineError, ServiceClient, ServiceError, SGLangClient
from sglang_capture.commands._estimate import existing
from sglang_capture.commands._model import read_spec
from sglang_capture.commands._output import human_bytes
from sglang_capture.errors import UsageError
from sglang_capture.layers import LayerError
from sglang_capture.probe import NoProbeError, Prober, server_api_key
from sglang_capture.quota import cgroup_headroom, free_bytes
from sglang_capture.selftest import Finding, State, run_self_test
from sglang_capture.settings import SettingsError, plugin_settings
from sglang_capture.spool import SpoolError, SpoolStatus

_GROUP, _ENTRY_POINT = "sglang.srt.plugins", "sglang_capture"
_HOOKS_MODULE = "sglang_capture_patches.compat"
_FAMILIES_MODULE = "sglang_capture_patches.families"
_HOOKS_SECONDS = 300
_PROBE_SECONDS = 10.0
_LITTLE_SPOOL = 1 << 30


@dataclass(frozen=True)
class Check(Finding):
    """A finding as the command prints it."""

    def line(self) -> str:
        return f"{self.name}: {self.found}" + (f". {self.advice}" if self.advice else "")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def run_checks(
    *, server: str | None, service: str | None, model: str | None, spool: Path | None, self_test: bool
) -> Iterator[Check]:
    """All findings, each as soon as it is known."""
    yield from _packages()
    yield _entry_point()
    yield _plugins_variable(os.environ.get("SGLANG_PLUGINS"))
    yield from _hooks()
    if model is not None:
        yield _model(model)
    try:
        settings = plugin_settings()
        directory = spool or settings.dir
        yield Check("settings", "ok", "the variables SGLANG_CAPTURE_… can be read")
    except SettingsError as error:
        directory = spool or spools.DEFAULT_DIRECTORY
        yield Check("settings", "wrong", str(error), "Correct the variable")
    yield from _spool(directory, named=server is not None)
    status = spools.read_status(directory) if directory.is_dir() else None
    if status is None and directory.exists() and _is_of_another_user(directory):
        yield Check("server's plugin", "warn", f"{directory} belongs to another user", "Run this as the server's user")
    else:
        yield from _status(status)
    found = asyncio.run(_server(server, status))
    yield found
    if server is not None and self_test and found.state == "ok":
        yield from _self_test(server, directory)
    yield asyncio.run(_service(service))


def _packages() -> Iterator[Check]:
    yield Check("python", "ok", platform.python_version())
    yield Check("sglang-capture", "ok", _version("sglang-capture") or "not installed as a package")
    yield Check("torch", "ok", _version("torch") or "not found")
    if version := _version("sglang"):
        yield Check("sglang", "ok", version)
    else:
        yield Check(
            "sglang", "warn", "not installed here", "Where the server runs: pip install 'sglang-capture[sglang]'"
        )
    if version := _version("transformers"):
        yield Check("transformers", "ok", version)
    else:
        advice = "Rows with messages, and verify, need it: pip install 'sglang-capture[transformers]'"
        yield Check("transformers", "warn", "not installed here", advice)


def _entry_point() -> Check:
    found = list(metadata.entry_points(group=_GROUP, name=_ENTRY_POINT))
    if found:
        return Check("plugin", "ok", f"SGLang finds it: {found[0].value} in {_GROUP}")
    advice = "Install sglang-capture into the environment that SGLang runs in"
    return Check("plugin", "wrong", f"no entry point {_ENTRY_POINT} in the group {_GROUP}", advice)


def _plugins_variable(value: str | None) -> Check:
    """SGLang loads all plugins where the variable is not set, else only those it names."""
    if not value:
        return Check("SGLANG_PLUGINS", "ok", "not set in this shell, so SGLang loads every plugin")
    if _ENTRY_POINT in (name.strip() for name in value.split(",")):
        return Check("SGLANG_PLUGINS", "ok", f"{value} in this shell")
    advice = f"A server started from this shell would not load the plugin: set SGLANG_PLUGINS={value},{_ENTRY_POINT}"
    return Check("SGLANG_PLUGINS", "wrong", f"{value} in this shell", advice)


def _hooks() -> Iterator[Check]:
    """What the plugin would hook, as its own table says; another process, because SGLang is heavy to import."""
    if not _version("sglang"):
        return
    command = [sys.executable, "-m", _HOOKS_MODULE, "--json"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_HOOKS_SECONDS, check=False)
        report = json.loads(result.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Check(
            "hooks", "warn", f"SGLang was not imported within {_HOOKS_SECONDS} s", "Try again on an idle machine"
        )
        return
    except (ValueError, IndexError):
        last = next(iter(reversed(result.stderr.strip().splitlines())), "no message")
        yield Check("hooks", "wrong", f"python -m {_HOOKS_MODULE} failed: {last}", "Run it to see everything it says")
        return
    if report["ok"]:
        yield Check("hooks", "ok", f"SGLang {report['sglang']} has all that is hooked: {len(report['hooks'])} places")
    for problem in report["problems"]:
        yield Check("hooks", "wrong", problem, f"python -m {_HOOKS_MODULE} says what to install")


def _model(model: str) -> Check:
    try:
        spec = read_spec(model, None, None)
    except (UsageError, LayerError) as error:
        return Check("model", "wrong", str(error))
    found = (
        f"{spec.architecture}, {spec.num_layers} layers of hidden size {spec.hidden_size}: by default the layers "
        f"{', '.join(map(str, spec.layers))} and the last hidden state, {spec.bytes_per_token:,} bytes a token"
    )
    if _proved(spec.architecture):
        return Check("model", "ok", found)
    advice = (
        "Its rows were not compared with transformers: docs/models.md says whether it can be captured from, and so "
        "does the server when it starts"
    )
    return Check("model", "warn", found, advice)


def _proved(architecture: str) -> bool:
    """What the plugin's own table says; another process, as for the hooks."""
    command = [sys.executable, "-m", _FAMILIES_MODULE, architecture]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_HOOKS_SECONDS, check=False)
    return done.stdout.strip() == architecture


def _spool(directory: Path, *, named: bool) -> Iterator[Check]:
    """``named``: a server is asked about that somebody else may have started; then the spool may be theirs."""
    try:
        spools.open_directory(directory, create=False)
        yield Check("spool", "ok", f"{directory} is ours alone")
    except SpoolError as error:
        if directory.exists() or directory.is_symlink():
            yield Check("spool", "warn" if named and _is_of_another_user(directory) else "wrong", str(error))
        else:
            yield Check("spool", "warn", f"{directory} is not there yet", "The server makes it when it starts")
    free, headroom = free_bytes(existing(directory)), cgroup_headroom()
    limit = "" if headroom is None else f", and the control group's memory limit leaves {human_bytes(headroom)}"
    state: State = "ok" if free > _LITTLE_SPOOL else "warn"
    advice = "" if state == "ok" else "That is little: captures will wait for the packer; give /dev/shm more room"
    yield Check("room", state, f"{human_bytes(free)} usable at {directory}{limit}", advice)


def _status(status: SpoolStatus | None) -> Iterator[Check]:
    if status is None:
        advice = "Start SGLang with SGLANG_PLUGINS=sglang_capture and this SGLANG_CAPTURE_DIR"
        yield Check("server's plugin", "warn", "no server has used this spool", advice)
        return
    if not status.alive:
        age = f"{time.time() - status.time:,.0f} s"
        advice = "That server was stopped, or hangs; start SGLang again"
        yield Check("server's plugin", "warn", f"process {status.pid} last wrote its status {age} ago", advice)
    elif status.state == "refused":
        yield Check("server's plugin", "wrong", f"loaded, but it cannot capture: {status.problem}")
    else:
        counts = status.counts
        used = f"{human_bytes(status.used_bytes)} of {human_bytes(status.quota_bytes)} used"
        done = f"{counts.published:,} captured, {counts.failed:,} failed, {counts.refused:,} refused"
        yield Check("server's plugin", "ok", f"capturing from {status.model_path}: {done}, {used}")
    if status.last_error:
        yield Check("last error", "warn", status.last_error)


async def _server(url: str | None, status: SpoolStatus | None) -> Check:
    known = status.url.replace("//0.0.0.0", "//127.0.0.1") if status and status.alive else ""
    address = url or known
    if not address:
        return Check("server", "warn", "none known here", "Name one with --server to see whether it answers")
    try:
        async with SGLangClient(address, api_key=server_api_key(), timeout=_PROBE_SECONDS) as client:
            info = await client.server_info()
    except (EngineError, UsageError) as error:
        return Check("server", "wrong", str(error))
    return Check("server", "ok", f"SGLang {info.version} serves {info.served_name} at {address}")


def _self_test(url: str, directory: Path) -> Iterator[Check]:
    try:
        for finding in run_self_test(Prober.connect(url, directory)):
            yield Check(f"self-test, {finding.name}", finding.state, finding.found, finding.advice)
    except NoProbeError as error:
        # A server that was named for this, of which nobody can say that it captures rightly, must not pass.
        yield Check("self-test", "wrong", f"not run: {error}", "--no-self-test leaves it out")
    except (EngineError, UsageError) as error:
        yield Check("self-test", "wrong", str(error))


async def _service(url: str | None) -> Check:
    address = url or SERVICE_URL
    try:
        async with ServiceClient(address, timeout=_PROBE_SECONDS) as client:
            health: dict[str, Any] = await client.health()
    except UsageError as error:
        return Check("side service", "wrong", str(error))
    except ServiceError as error:
        return Check("side service", "wrong" if url else "warn", error.detail)
    if health["problems"]:
        return Check("side service", "wrong", f"runs at {address}, but: {'; '.join(health['problems'])}")
    return Check("side service", "ok", f"version {health['version']} at {address}, data in {health['data']}")


def _is_of_another_user(directory: Path) -> bool:
    return directory.lstat().st_uid != os.geteuid()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
