"""The SGLang server that the spool belongs to, and whether it answers."""

from __future__ import annotations

import asyncio
import time

from sglang_capture.client import EngineError, SGLangClient
from sglang_capture.service.models import EngineHealth
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.settings import ServiceSettings

_PROBE_SECONDS = 3.0
_PROBE_AGE_SECONDS = 5.0


class Engine:
    """One client, made anew when the server turns up at another address."""

    def __init__(self, settings: ServiceSettings, monitor: SpoolMonitor):
        self._settings = settings
        self._monitor = monitor
        self._client: SGLangClient | None = None
        self._retired: list[SGLangClient] = []
        self._health: EngineHealth | None = None
        self._probed = 0.0

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

    async def health(self) -> EngineHealth:
        """Whether the server answers; asked every few seconds at most."""
        if self._health is None or time.monotonic() - self._probed > _PROBE_AGE_SECONDS:
            self._health = await self._probe()
            self._probed = time.monotonic()
        return self._health

    async def close(self) -> None:
        for client in (*self._retired, *([self._client] if self._client else [])):
            await client.aclose()

    async def _probe(self) -> EngineHealth:
        client = self.client()
        try:
            await asyncio.wait_for(client.server_info(), _PROBE_SECONDS)
        except EngineError as error:
            return EngineHealth(url=client.url, reachable=False, problem=str(error))
        except asyncio.TimeoutError:
            problem = f"SGLang at {client.url} has not answered within {_PROBE_SECONDS:g} s: it is busy, or hangs"
            return EngineHealth(url=client.url, reachable=False, problem=problem)
        return EngineHealth(url=client.url, reachable=True)
