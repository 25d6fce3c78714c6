"""A look at a running server: have it capture a prompt, take the rows, and leave nothing behind.

For the self-test of `doctor`, and for `verify` against a second server. A probe is a capture like any other, under an
id that the side service and `pack` pass over (:func:`sglang_capture.spool.is_probe`). Its dump is read from the
server's spool, so this runs on the server's machine and as its user. Secrets come from the environment alone.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from sglang_capture import spool as spools
from sglang_capture.client import ServerInfo, SGLangClient
from sglang_capture.dump import Dump, DumpError, load_dump
from sglang_capture.errors import CaptureError
from sglang_capture.prompts import Prompt
from sglang_capture.spec import CaptureSpec, LastHidden
from sglang_capture.spool import PROBE_PREFIX, SpoolError, SpoolStatus

_APPEAR_SECONDS = 60.0
"""How long after the server's answer a dump may take to appear."""


class ProbeError(CaptureError):
    """The server did not capture a prompt; ``retriable`` says whether it may at another time."""

    def __init__(self, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.retriable = retriable


class NoProbeError(ProbeError):
    """From here this server cannot be looked at: no plugin, not its spool, not its user."""


@dataclass(frozen=True)
class Prober:
    """Takes captures from one server.

    Attributes:
        spec: what a capture of this server holds by default.
        status: as the plugin wrote it when the prober was made.
    """

    url: str
    directory: Path
    info: ServerInfo
    status: SpoolStatus
    spec: CaptureSpec
    timeout: float = 600.0

    @classmethod
    def connect(cls, url: str, directory: Path) -> Prober:
        """Ask the server what it is, and its plugin, by the spool's status, whether it captures.

        Raises:
            EngineError: no SGLang server answers at ``url``.
            NoProbeError: its captures cannot be had from here; the message says why, and what to do.
        """
        info = asyncio.run(_server_info(url))
        status = _status_of(url, directory, info)
        try:
            spec = CaptureSpec.model_validate(status.spec)
        except ValueError as error:
            raise NoProbeError(f"the status in {directory} names no spec: is it of another version?") from error
        if status.token_required and _token() is None:
            raise NoProbeError(f"marks for {url} need its secret: set SGLANG_CAPTURE_TOKEN as the server has it")
        spools.clear_probes(directory)
        return cls(url, directory, info, status, spec)

    def take(self, input_ids: Sequence[int], *, layers: Sequence[int], last_hidden: LastHidden) -> Dump:
        """The capture of a prompt, in memory of its own; nothing of it is left in the spool.

        Raises:
            EngineError: the server did not take the prompt.
            ProbeError: it captured nothing, or not this prompt.
        """
        capture_id = PROBE_PREFIX + uuid.uuid4().hex
        try:
            asyncio.run(self._send(capture_id, input_ids, layers, last_hidden))
            dump = self._appeared(capture_id)
        finally:
            spools.remove(self.directory, capture_id)
        if dump.input_ids.tolist() != list(input_ids):
            raise ProbeError(f"a capture from {self.url} holds {dump.tokens} token ids that are not those it was sent")
        return dump

    async def _send(
        self, capture_id: str, input_ids: Sequence[int], layers: Sequence[int], last_hidden: LastHidden
    ) -> None:
        prompt = Prompt(capture_id, list(input_ids), None, None, {}, "")
        async with _client(self.url, self.timeout, token=_token()) as client:
            await client.capture(prompt, layers=layers, last_hidden=last_hidden)

    def _appeared(self, capture_id: str) -> Dump:
        """The dump, copied: its pages may be used again once it is removed."""
        deadline = time.monotonic() + _APPEAR_SECONDS
        while time.monotonic() < deadline:
            try:
                return _copied(load_dump(spools.dump_path(self.directory, capture_id)))
            except FileNotFoundError:
                pass  # not there yet, or never
            except DumpError as error:
                raise ProbeError(f"a capture from {self.url} cannot be read: {error}") from error
            failure = spools.read_failure(spools.failure_path(self.directory, capture_id))
            if failure is not None:
                raise ProbeError(f"{self.url} captured nothing: {failure.reason}", retriable=failure.retriable)
            time.sleep(0.02)
        raise ProbeError(
            f"{self.url} answered, and neither a capture nor a failure appeared in {self.directory} within "
            f"{_APPEAR_SECONDS:g} s: is this the server's spool?"
        )


def _copied(dump: Dump) -> Dump:
    return replace(
        dump,
        input_ids=dump.input_ids.clone(),
        hidden_states=dump.hidden_states.clone(),
        last_hidden={key: rows.clone() for key, rows in dump.last_hidden.items()},
    )


def _status_of(url: str, directory: Path, info: ServerInfo) -> SpoolStatus:
    """What the plugin of the server at ``url`` says in ``directory``."""
    try:
        spools.open_directory(directory, create=False)
    except SpoolError as error:
        advice = "name the server's spool, and run this as the server's user"
        raise NoProbeError(f"the captures of {url} cannot be read from here: {error}; {advice}") from error
    status = spools.read_status(directory)
    if status is None:
        raise NoProbeError(
            f"no plugin has written to {directory}: start {url} with SGLANG_PLUGINS=sglang_capture, or name its spool "
            "(on the server's machine)"
        )
    if not status.alive:
        raise NoProbeError(f"the plugin that wrote to {directory} has stopped: is it the spool of {url}?")
    if info.port is not None and httpx.URL(status.url).port not in (None, info.port):
        raise NoProbeError(f"{directory} is the spool of the server at {status.url}, not of {url}: name the right one")
    if status.state != "capturing":
        raise NoProbeError(f"the plugin of {url} is loaded, but cannot capture: {status.problem}")
    return status


async def _server_info(url: str) -> ServerInfo:
    async with _client(url, timeout=30.0) as client:
        return await client.server_info()


def _client(url: str, timeout: float, token: str | None = None) -> SGLangClient:
    return SGLangClient(url, token=token, api_key=server_api_key(), timeout=timeout)


def server_api_key() -> str | None:
    """The key that SGLang's ``--api-key`` asks for, from the environment."""
    return os.environ.get("SGLANG_CAPTURE_SERVER_API_KEY") or None


def _token() -> str | None:
    return os.environ.get("SGLANG_CAPTURE_TOKEN") or None
