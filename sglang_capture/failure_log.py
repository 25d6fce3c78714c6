"""The failures that one writer leaves in its spool: few enough for the memory, and none lost to a full file system."""

from __future__ import annotations

from pathlib import Path

from sglang_capture.spool import Failure, dump_path, failure_path, write_failure

MOST_FAILURES = 10_000
"""Failure files written per server start; each takes a page of memory, and a flood of bad marks must not fill it."""


class FailureLog:
    """Writes ``<id>.failed.json``; used on the writer's thread alone.

    Args:
        directory: the spool.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written = 0
        self._unwritten: dict[str, Failure] = {}

    def write(self, failure: Failure) -> None:
        """Leave a failure, unless there are too many, or a dump of that id stands."""
        if self._written >= MOST_FAILURES or dump_path(self._directory, failure.capture_id).exists():
            return
        self._written += 1
        try:
            write_failure(self._directory, failure)
        except OSError:  # a full file system has no room for it either
            self._written -= 1
            if len(self._unwritten) < MOST_FAILURES:
                self._unwritten[failure.capture_id] = failure

    def write_again(self) -> None:
        """Those that could not be written: who waits for a capture waits until it has ended."""
        waiting, self._unwritten = self._unwritten, {}
        for failure in waiting.values():
            if self._unwritten:
                self._unwritten[failure.capture_id] = failure
            else:
                self.write(failure)

    def forget(self, capture_id: str) -> None:
        """A capture of that id begins, or is complete: what went wrong before is over."""
        self._unwritten.pop(capture_id, None)
        failure_path(self._directory, capture_id).unlink(missing_ok=True)
