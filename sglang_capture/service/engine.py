"""The SGLang server that the spool belongs to, and whether it answers."""

from __future__ import annotations

import asyncio
import time

from sglang_capture.client import EngineError, ServerInfo, SGLangClient
from sglang_capture.service.models import EngineHealth
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.settings import ServiceSettings

_PROBE_SECONDS = 3.0
_PROBE_AGE_SECONDS = 5.0
_PATIENCE_SECONDS = 0.3
_INFO_AGE_SECONDS = 60.0


class Engine:
    """One client, made anew when the server turns up at another address."""

    def __init__(self, settings: ServiceSettings, monitor: SpoolMonitor):
        self._settings = settings
        self._monitor = monitor
        self._client: SGLangClient | None = None
        self._retired: list[SGLangClient] = []
        self._health: EngineHealth | None = None
        self._probe: asyncio.Task[EngineHealth] | None = None
        self._probe_at = 0.0
        self._info: tuple[SGLangClient, ServerInfo, float] | None = None

    @property
    def url(self) -> str:
        return self._monitor.server_url(self._settings.server)

    def client(self) -> SGLangClient:
        """The client of the server as it is known now."""
        url = self.url.rstrip("/")
        if self._client is None or self._client.url != url:
            if self._client is not None:
                self._retired.append(self._client)  # requests may still be on it
            key, token = self._settings.server_api_key, self._settings.token
            self._client = SGLangClient(
                url,
                token=token.get_secret_value() if token else None,
                api_key=key.get_secret_value() if key else None,
            )
        return self._client

    async def longest_prompt(self) -> int | None:
        """A prompt must have fewer tokens than this; asked once a minute. Raises EngineError: the server is away."""
        client, now = self.client(), time.monotonic()
        if self._info is None or self._info[0] is not client or now - self._info[2] > _INFO_AGE_SECONDS:
            self._info = (client, await client.server_info(), now)
        return self._info[1].longest_prompt

    async def health(self) -> EngineHealth:
        """Whether the server answers: asked every few seconds at most, and not waited for long once that is known."""
        if self._probe is None and time.monotonic() >= self._probe_at:
            self._probe = asyncio.create_task(self._ask())
        if (probe := self._probe) is not None:
            await asyncio.wait([probe], timeout=_PATIENCE_SECONDS if self._health else None)
            if probe.done() and self._probe is probe:
                self._health, self._probe = probe.result(), None
                self._probe_at = time.monotonic() + _PROBE_AGE_SECONDS
        assert self._health is not None, "the first probe is waited for"
        return self._health

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        for client in (*self._retired, *([self._client] if self._client else [])):
            await client.aclose()

    async def _ask(self) -> EngineHealth:
        client = self.client()
        try:
            await asyncio.wait_for(client.server_info(), _PROBE_SECONDS)
        except EngineError as error:
            return EngineHealth(url=client.url, reachable=False, problem=str(error))
        except asyncio.TimeoutError:
            problem = f"SGLang at {client.url} has not answered within {_PROBE_SECONDS:g} s: it is busy, or hangs"
            return EngineHealth(url=client.url, reachable=False, problem=problem)
        return EngineHealth(url=client.url, reachable=True)
