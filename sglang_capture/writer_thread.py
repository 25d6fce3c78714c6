"""The thread that does what the engine's thread must not wait for: in order, and whatever goes wrong."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 1.0
POLL_SECONDS = 0.005
QUIET_SECONDS = 60.0
"""An error that comes again and again is logged once in this time: housekeeping may meet it every second."""

Task = Callable[[], None]


def _nothing() -> None:
    """Wakes the thread."""


class WriterThread:
    """Runs tasks one after the other, keeps house once a second, and looks for other processes' progress.

    Args:
        keep_house: called about once a second.
        poll: called between tasks; true while there is something that another process is still to do.
        on_error: told of any task's exception. The thread outlives it: without it every later capture would hang.
    """

    def __init__(self, keep_house: Task, poll: Callable[[], bool], on_error: Callable[[Exception], None]):
        self._keep_house = keep_house
        self._poll = poll
        self._on_error = on_error
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._closing = False
        self._logged = ("", 0.0)
        self._thread = threading.Thread(target=self._work, name="sglang-capture-writer", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        """Finish what was submitted, and what that submits in turn; then stop."""
        self._closing = True
        self._tasks.put(_nothing)
        self._thread.join()

    def _work(self) -> None:
        due = time.monotonic() + HOUSEKEEPING_SECONDS
        waiting = False
        while not self._closing or not self._tasks.empty():
            pause = max(0.0, due - time.monotonic())
            with contextlib.suppress(queue.Empty):  # then it is time to look around
                self._guarded(self._tasks.get(timeout=min(pause, POLL_SECONDS) if waiting else pause))
            waiting = self._guarded(self._poll) or False
            if time.monotonic() >= due:
                self._guarded(self._keep_house)
                due = time.monotonic() + HOUSEKEEPING_SECONDS

    def _guarded(self, task: Callable[[], bool | None]) -> bool | None:
        try:
            return task()
        except Exception as error:
            self._log(error)
            self._on_error(error)
            return None

    def _log(self, error: Exception) -> None:
        # The text of an OSError names a file, which may be another each time.
        kind = f"{type(error).__name__} {getattr(error, 'errno', None) or error}"
        last, until = self._logged
        now = time.monotonic()
        if kind != last or now >= until:
            logger.error("sglang-capture: the writer goes on after an error", exc_info=error)
            self._logged = (kind, now + QUIET_SECONDS)
