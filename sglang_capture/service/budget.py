"""Holding requests back while the spool has no room for their captures.

A full spool is normal in a long run: the engine is faster than the disk that shards are written to. The plugin refuses
a capture that does not fit; asking before a request is sent makes that rare, and costs nothing but the wait.

What counts against the free space that the status names is every capture that was let go and has not been seen in a
status yet. A capture is counted twice while the plugin fills it; that is on the safe side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from sglang_capture.service.monitor import Moment, SpoolMonitor
from sglang_capture.service.problems import ProblemError


class SpoolBudget:
    """The room in one spool, given out first come, first served.

    Args:
        monitor: says what is free.
        make_room: called while somebody waits; wakes the packer.
    """

    def __init__(self, monitor: SpoolMonitor, make_room: Callable[[], None]):
        self.waiting = 0
        self._monitor = monitor
        self._make_room = make_room
        self._turn = asyncio.Lock()
        self._outstanding = 0
        self._unseen: list[tuple[Moment, int]] = []

    @contextlib.asynccontextmanager
    async def room(self, size: int, patience: float, *, guess: bool = False) -> AsyncIterator[None]:
        """Wait for ``size`` bytes, and hold them while the block runs.

        Args:
            guess: ``size`` is a bound that may be far too high (a text's length in bytes): such a capture is never
                refused as too large, and waits for half the quota at most.

        Raises:
            ProblemError: the capture is larger than the whole quota (``too-large``); there was no room within
                ``patience`` seconds (``spool-full``); the server went away meanwhile (``no-plugin``).
        """
        quota = self._monitor.require().quota_bytes
        if guess:
            size = min(size, quota // 2)
        if size > quota:
            raise ProblemError(
                "too-large",
                f"the capture takes up to {size:,} bytes and the whole spool may hold {quota:,}: raise "
                "SGLANG_CAPTURE_QUOTA, ask for fewer layers, or send a shorter prompt",
            )
        taken: list[int] = []
        try:
            await self._wait(size, patience, taken)
            yield
        finally:
            for held in taken:
                self._outstanding -= held
                self._unseen.append((Moment.now(), held))

    async def _wait(self, size: int, patience: float, taken: list[int]) -> None:
        self.waiting += 1
        try:
            await asyncio.wait_for(self._take(size, taken), patience)
        except asyncio.TimeoutError:
            status = self._monitor.require()
            raise ProblemError(
                "spool-full",
                f"the capture takes up to {size:,} bytes, and for {patience:g} s the spool had no more than "
                f"{status.free_bytes:,} free: look in /health whether the packer can write, and whether something "
                f"else fills {self._monitor.directory}",
            ) from None
        finally:
            self.waiting -= 1

    async def _take(self, size: int, taken: list[int]) -> None:
        """Noted in ``taken`` at the moment it counts, so that it is given back whenever the wait is broken off."""
        async with self._turn:
            while not self._fits(size):
                self._make_room()
                await self._monitor.look_again()
            self._outstanding += size
            taken.append(size)

    def _fits(self, size: int) -> bool:
        status = self._monitor.require()
        self._unseen = [(when, held) for when, held in self._unseen if not self._monitor.knows_of(when)]
        unseen = sum(held for _, held in self._unseen)
        return self._outstanding + unseen + size <= status.free_bytes
