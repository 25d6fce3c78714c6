"""Tasks that must run as long as the service does: a fault in one is logged and shown, and it is started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)
_RESTART_SECONDS = 1.0
_TOLD_SECONDS = 300.0


class Background:
    """The endless tasks of a service, by name."""

    def __init__(self) -> None:
        self._stumbles: dict[str, tuple[float, str]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._keep(name, body), name=name))

    def problems(self) -> dict[str, str]:
        """Which of them stumbled in the last minutes, and over what."""
        since = time.monotonic() - _TOLD_SECONDS
        return {name: what for name, (when, what) in self._stumbles.items() if when > since}

    async def stop(self) -> None:
        """Cancel all of them, and wait until what they had on worker threads has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await body()
            except Exception as error:
                self._stumbles[name] = time.monotonic(), f"{type(error).__name__}: {error}"
                _log.exception("the %s stumbled and starts again", name)
            await asyncio.sleep(_RESTART_SECONDS)


async def wait_briefly(event: asyncio.Event, seconds: float) -> None:
    """Wait until ``event`` is set, but not longer than that; then clear it."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    event.clear()
