"""What the plugin says of itself: ``status.json``, read twice a second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from sglang_capture import spool
from sglang_capture.claim import clear_after_death
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.settings import DEFAULT_SERVER
from sglang_capture.spool import STATUS_STALE_SECONDS, SpoolStatus

_READ_SECONDS = 0.5


@dataclass(frozen=True)
class Moment:
    """A point in time by two clocks: that of a status (seconds since the epoch), and one that nobody sets."""

    wall: float
    steady: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.time(), time.monotonic())


class SpoolMonitor:
    """The newest status of the server on one spool."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.status: SpoolStatus | None = None
        self._news = asyncio.Condition()
        self._buried = ""

    async def run(self) -> None:
        while True:
            self.refresh()
            self._see_to_the_dead()
            async with self._news:
                self._news.notify_all()
            await asyncio.sleep(_READ_SECONDS)

    def _see_to_the_dead(self) -> None:
        """A server that was killed leaves what it had under way: memory that only its next start would free."""
        status = self.status
        if status is not None and not status.alive and status.server_id != self._buried:
            clear_after_death(self.directory)
            self._buried = status.server_id

    def refresh(self) -> SpoolStatus | None:
        """Read the status now; a file of a few hundred bytes in memory needs no worker thread."""
        self.status = spool.read_status(self.directory)
        return self.status

    async def look_again(self) -> None:
        """Wait until the status has been read once more."""
        async with self._news:
            await self._news.wait()

    def problem(self) -> str | None:
        """Why nothing can be captured now, and what to do; ``None`` if all is well."""
        status = self.status
        if status is None:
            return (
                f"no server with the plugin uses the spool {self.directory}: start SGLang with "
                "SGLANG_PLUGINS=sglang_capture and the same SGLANG_CAPTURE_DIR as this service (and not with "
                "SGLANG_CAPTURE_MODE=off)"
            )
        if not status.alive:
            return (
                f"the server on the spool {self.directory} (process {status.pid}) has stopped writing its status: it "
                "was stopped or hangs; start SGLang again with SGLANG_PLUGINS=sglang_capture"
            )
        if status.state == "refused":
            return f"the plugin is loaded but cannot capture: {status.problem}"
        return None

    def knows_of(self, moment: Moment) -> bool:
        """Whether the status was written after ``moment``.

        When the clock was set back meanwhile, its time does not tell. But a server that is alive has written one since
        such a while.
        """
        if self.status is None:
            return False
        return self.status.time > moment.wall or time.monotonic() - moment.steady > STATUS_STALE_SECONDS

    def require(self) -> SpoolStatus:
        """The status of a server that captures, read now.

        Raises:
            ProblemError: there is none (``no-plugin``).
        """
        status = self.refresh()
        if (problem := self.problem()) or status is None:
            raise ProblemError("no-plugin", problem or "")
        return status

    def server_url(self, configured: str | None) -> str:
        """Where SGLang listens: as configured, else as its plugin says, else its usual port."""
        if configured or not (self.status and self.status.url):
            return configured or DEFAULT_SERVER
        return self.status.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
