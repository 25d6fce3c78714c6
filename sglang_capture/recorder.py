"""From marked requests and rows to published dumps: the writer of one rank. Pure torch; nothing here knows SGLang.

The engine's thread calls :meth:`Recorder.begin`, :meth:`Recorder.copy` and :meth:`Recorder.commit`; a thread of ours
lays dumps out, publishes them and keeps house. The engine's thread waits for ours in two cases only: rows arrive before
their dump is laid out (milliseconds), or the spool is full and ``SGLANG_CAPTURE_ON_FULL=wait``.

Nothing here raises into the engine: whatever goes wrong ends one capture, with its reason in ``<id>.failed.json``.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from sglang_capture.capture import Capture, CaptureRequest
from sglang_capture.copying import Copier, DirectCopier, PinnedCopier
from sglang_capture.dump import DumpFile, reserved_bytes
from sglang_capture.quota import Account
from sglang_capture.spool import PART_PREFIX, SPOOL_FULL, Counts, Failure, dump_path, failure_path, write_failure

logger = logging.getLogger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}

LAYOUT_SECONDS = 30.0
"""How long rows wait for their dump to be laid out before the capture fails."""

HOUSEKEEPING_SECONDS = 1.0

MOST_FAILURES = 10_000
"""Failure files written per server start; each takes a page of memory, and a flood of bad marks must not fill it."""


class Recorder:
    """Writes the dumps of one rank.

    Args:
        directory: the spool; this process holds the claim on it.
        account: this writer's part of the quota.
        rank: a name for this writer, unique among the server's ranks (part of the unfinished files' names).
        device: where the engine's tensors are.
        on_full, wait_seconds: what to do when there is no room.
        housekeeping: called about once a second on the writer's thread.
    """

    def __init__(
        self,
        directory: Path,
        account: Account,
        *,
        rank: str,
        device: str,
        on_full: Literal["refuse", "wait"] = "refuse",
        wait_seconds: float = 60.0,
        housekeeping: Callable[[], None] = lambda: None,
    ):
        self.directory = directory
        self.account = account
        self.counts = Counts()
        self.last_error = ""
        self._rank = rank
        self._on_full = on_full
        self._wait_seconds = wait_seconds
        self._housekeeping = housekeeping
        self._open: set[Capture] = set()
        self._lock = threading.Lock()
        self._number = 0
        self._failures_written = 0
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._copier: Copier = PinnedCopier(self._tasks.put) if device.startswith("cuda") else DirectCopier()
        self._thread = threading.Thread(target=self._work, name="sglang-capture-writer", daemon=True)
        self._thread.start()

    # -- called on the engine's thread ------------------------------------------------------------------------

    def begin(self, request: CaptureRequest) -> Capture:
        """Begin a capture: reserve its bytes, and have its dump laid out. Refused captures come back closed."""
        self._number += 1
        part = self.directory / f"{PART_PREFIX}{self._rank}-{self._number}"
        capture = Capture(request, part)
        self.counts.marked += 1
        refusal = self._admit(capture)
        if refusal is not None:
            capture.open = False
            if refusal:
                self.refuse(request.capture_id, request.request_id, refusal, retriable=refusal.startswith(SPOOL_FULL))
            return capture
        with self._lock:
            self._open.add(capture)
        self._tasks.put(lambda: self._lay_out(capture))
        return capture

    def copy(self, capture: Capture, key: int | str, rows: torch.Tensor, position: int) -> None:
        """Copy ``rows`` ``[n, H]`` to the prompt positions ``position, position + 1, …`` of one layer or last state.

        Args:
            key: a hidden-state index, or the key of a last hidden state.
        """
        if not capture.open:
            return
        try:
            if not capture.laid_out.wait(LAYOUT_SECONDS):
                raise TimeoutError(f"its dump was not laid out within {LAYOUT_SECONDS:.0f} s")
            dump = capture.dump
            if dump is None:  # it failed meanwhile, on the writer's thread
                return
            place = _place(dump, key)[position : position + rows.shape[0]]
            if place.shape != rows.shape or place.dtype != rows.dtype:
                raise ValueError(
                    f"rows of {key} are {rows.dtype} {list(rows.shape)}, and {place.dtype} {list(place.shape)} fit"
                )
            self._copier.copy(place, rows)
            self.counts.copies += 1
        except Exception as error:
            self.fail(capture, f"its rows could not be copied: {error}")

    def commit(self, capture: Capture, start: int, stop: int) -> None:
        """All that was asked for of the positions ``[start, stop)`` was copied; a complete capture is published."""
        if not capture.open:
            return
        capture.coverage.add(start, stop)
        if capture.coverage.reaches(capture.request.tokens) and self._close(capture):
            self._tasks.put(lambda: self._publish(capture))

    def fail(self, capture: Capture, reason: str) -> None:
        """End a capture without a dump."""
        if self._close(capture):
            self.counts.failed += 1
            self._tasks.put(lambda: self._discard(capture))
            request = capture.request
            self._record_failure(
                request.capture_id, request.request_id, "failed", reason, reason.startswith(SPOOL_FULL)
            )

    def refuse(self, capture_id: str, request_id: str, reason: str, *, retriable: bool = False) -> None:
        """Record that a marked request is not captured."""
        self.counts.refused += 1
        self._record_failure(capture_id, request_id, "refused", reason, retriable)

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Finish what was submitted, and stop the thread."""
        self._tasks.put(None)
        self._thread.join()

    # -- admission --------------------------------------------------------------------------------------------

    def _admit(self, capture: Capture) -> str | None:
        """None to go on, the empty string for a duplicate, or the reason to refuse."""
        request = capture.request
        if dump_path(self.directory, request.capture_id).exists():
            self.counts.duplicates += 1
            return ""
        size = reserved_bytes(request.tokens, request.spec)
        if size > self.account.limit:
            return f"larger than the spool: it needs {size} bytes, and the quota is {self.account.limit}"
        deadline = time.monotonic() + (self._wait_seconds if self._on_full == "wait" else 0.0)
        while not self.account.reserve(capture.part, size):
            # Captures under way end only if the engine goes on: to wait for their room would be to wait for ever.
            if time.monotonic() >= deadline or size > self.account.limit - self._under_way():
                return f"{SPOOL_FULL}: {size} bytes are needed, {self.account.free} of {self.account.limit} are free"
            time.sleep(0.02)
        return None

    def _under_way(self) -> int:
        """Bytes of the captures that still want rows."""
        with self._lock:
            return sum(reserved_bytes(open_one.request.tokens, open_one.request.spec) for open_one in self._open)

    def _close(self, capture: Capture) -> bool:
        """Whether this call is the one that ends the capture."""
        with self._lock:
            if not capture.open:
                return False
            capture.open = False
            self._open.discard(capture)
            return True

    def _record_failure(
        self, capture_id: str, request_id: str, kind: Literal["refused", "failed"], reason: str, retriable: bool
    ) -> None:
        logger.warning("sglang-capture: %s %s: %s", capture_id, kind, reason)
        self.last_error = f"{capture_id}: {reason}"
        failure = Failure(
            capture_id=capture_id,
            request_id=request_id,
            kind=kind,
            reason=reason,
            retriable=retriable,
            time=time.time(),
        )
        self._tasks.put(lambda: self._write_failure(failure))

    # -- on the writer's thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        due = time.monotonic() + HOUSEKEEPING_SECONDS
        while True:
            try:
                task = self._tasks.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                task = self._keep_house
            if task is None:
                return
            self._guarded(task)
            if time.monotonic() >= due:
                if task != self._keep_house:
                    self._guarded(self._keep_house)
                due = time.monotonic() + HOUSEKEEPING_SECONDS

    def _guarded(self, task: Callable[[], None]) -> None:
        """The writer outlives any error: without it every later capture would hang."""
        try:
            task()
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            logger.exception("sglang-capture: the writer goes on after an error")

    def _lay_out(self, capture: Capture) -> None:
        request = capture.request
        try:
            if capture.open:
                failure_path(self.directory, request.capture_id).unlink(missing_ok=True)
                capture.dump = DumpFile(
                    capture.part, request.capture_id, request.request_id, request.spec, request.input_ids
                )
        except Exception as error:
            self.fail(capture, _reason(error))
        finally:
            capture.laid_out.set()

    def _publish(self, capture: Capture) -> None:
        dump, request = capture.dump, capture.request
        assert dump is not None  # only a laid-out capture gets rows
        final = dump_path(self.directory, request.capture_id)
        try:
            if dump.publish(final):
                self.account.rename(capture.part, final, dump.bytes)
                failure_path(self.directory, request.capture_id).unlink(missing_ok=True)
                self.counts.published += 1
                self.counts.tokens += request.tokens
                self.counts.bytes += request.tokens * request.spec.bytes_per_token
            else:
                self.account.release(capture.part)
                self.counts.duplicates += 1
        except OSError as error:
            self.account.release(capture.part)
            self.counts.failed += 1
            self._record_failure(request.capture_id, request.request_id, "failed", _reason(error), False)
        capture.dump = None

    def _discard(self, capture: Capture) -> None:
        capture.dump = None
        self.account.release(capture.part)
        capture.part.unlink(missing_ok=True)

    def _write_failure(self, failure: Failure) -> None:
        if self._failures_written >= MOST_FAILURES or dump_path(self.directory, failure.capture_id).exists():
            return
        self._failures_written += 1
        write_failure(self.directory, failure)

    def _keep_house(self) -> None:
        for capture in list(self._open):
            reason = capture.request.gone()
            if reason is not None:
                missing = capture.coverage.missing(capture.request.tokens)
                self.fail(capture, f"{reason}; rows {missing} of {capture.request.tokens} are missing")
        self.account.look()
        self._housekeeping()


def _place(dump: DumpFile, key: int | str) -> torch.Tensor:
    """Where the rows of ``key`` go: a view ``[T, H]``."""
    if isinstance(key, str):
        return dump.last_hidden[key]
    return dump.hidden_states[:, dump.spec.layers.index(key)]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"{SPOOL_FULL}: the file system has no room ({error.strerror})"
    return f"the spool cannot be written: {error}"
