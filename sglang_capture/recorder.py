"""From marked requests and rows to published dumps: the writer that answers for them.

Whatever goes wrong ends one capture, with its reason in ``<id>.failed.json``. Beside what a
:class:`~sglang_capture.filler.Filler` does there are admission (quota, duplicates), failures, and publishing. The
engine's thread waits here in one case only: the spool is full and ``SGLANG_CAPTURE_ON_FULL=wait``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from sglang_capture.capture import Capture, CaptureRequest
from sglang_capture.dump import DumpFile, reserved_bytes
from sglang_capture.failure_log import FailureLog
from sglang_capture.filler import Filler
from sglang_capture.mapped_file import MappedFile
from sglang_capture.mark import shortened
from sglang_capture.patience import Patience
from sglang_capture.quota import Account, in_pages
from sglang_capture.row_check import RowFaults
from sglang_capture.slabs import SlabPool
from sglang_capture.spool import NO_ROOM, PART_PREFIX, SPOOL_FULL, Failure, dump_path
from sglang_capture.stages import HANDOVER_SECONDS, Board, board_path

logger = logging.getLogger(__name__)

CHECK_BYTES = 64 << 20
"""A complete dump is looked at in blocks of this size: between them the thread lays out dumps that rows wait for."""

MOST_REASON = 1000
"""Characters of a reason that are kept: it may repeat what a client sent, and counts against no quota."""


class Recorder(Filler):
    """Writes the dumps of one rank; with pipeline stages, of the first stage's rank, and answers for the later ones.

    Args:
        account: this writer's part of the quota.
        rank: a name for this writer, unique among the server's ranks (part of the unfinished files' names).
        stages: how many pipeline stages fill its dumps; the later ones are given ``rank`` as their ``group``.
        on_full, wait_seconds: what to do when there is no room.
        nonfinite: whether a capture with NaN or Inf is refused, or published with its label.
        directory, device, housekeeping: as :class:`~sglang_capture.filler.Filler` takes them.
    """

    def __init__(
        self,
        directory: Path,
        account: Account,
        *,
        rank: str,
        device: str,
        stages: int = 1,
        on_full: Literal["refuse", "wait"] = "refuse",
        wait_seconds: float = 60.0,
        nonfinite: Literal["refuse", "label"] = "refuse",
        housekeeping: Callable[[], None] = lambda: None,
    ):
        self.account = account
        self.slabs = SlabPool(directory, account, rank)
        self._rank = rank
        self._stages = stages
        self._room_patience = Patience(wait_seconds if on_full == "wait" else 0.0)
        self._nonfinite = nonfinite
        self._number = 0
        self._failures = FailureLog(directory)
        self._handed_over: list[tuple[Capture, float]] = []
        super().__init__(directory, device=device, housekeeping=housekeeping)

    @property
    def in_flight(self) -> int:
        return super().in_flight + len(self._handed_over)

    def close(self) -> None:
        super().close()
        self.slabs.close()

    # -- called on the engine's thread ------------------------------------------------------------------------

    def begin_forward(self) -> None:
        super().begin_forward()
        self._room_patience.renew()

    def begin(self, request: CaptureRequest) -> Capture:
        """Begin a capture: reserve its bytes, and have its dump laid out. Refused captures come back closed."""
        capture = Capture(request, self._part())
        self.counts.marked += 1
        refusal = self._admit(capture)
        if refusal is not None:
            capture.open = False
            if refusal:
                self.refuse(request.capture_id, request.request_id, refusal, retriable=refusal.startswith(SPOOL_FULL))
            return capture
        self._enter(capture)
        self._thread.submit(lambda: self._lay_out(capture))
        return capture

    def refuse(self, capture_id: str, request_id: str, reason: str, *, retriable: bool = False) -> None:
        """Record that a marked request is not captured."""
        self.counts.refused += 1
        self._record_failure(capture_id, request_id, "refused", reason, retriable)

    # -- admission --------------------------------------------------------------------------------------------

    def _part(self) -> Path:
        self._number += 1
        return self.directory / f"{PART_PREFIX}{self._rank}-{self._number}"

    def _admit(self, capture: Capture) -> str | None:
        """None to go on, the empty string for a duplicate, or the reason to refuse."""
        request = capture.request
        if self.given_up:
            return self.given_up
        if dump_path(self.directory, request.capture_id).exists():
            self.counts.duplicates += 1
            return ""
        size = in_pages(reserved_bytes(request.tokens, request.spec))
        if size > self.account.limit:
            return f"larger than the spool: it needs {size} bytes, and the quota is {self.account.limit}"
        capture.file = self.slabs.take(capture.part, size)
        if capture.file is not None:
            self.counts.reused += 1
        elif not self._reserved(capture, size):
            return f"{SPOOL_FULL}: {size} bytes are needed, {self.account.free} of {self.account.limit} are free"
        if self._stages > 1:
            try:
                capture.board = Board.create(board_path(self.directory, self._rank, request), self._stages)
            except OSError as error:
                self._discard(capture)
                return _reason(error)
        return None

    def _reserved(self, capture: Capture, size: int) -> bool:
        """Whether there is room, now or after waiting for it."""
        with self._room_patience.waiting() as seconds:
            deadline = time.monotonic() + seconds
            while not self._room(capture, size):
                # Captures under way end only if the engine goes on: to wait for their room would be to wait for ever.
                if time.monotonic() >= deadline or size > self.account.limit - self._under_way():
                    return False
                time.sleep(0.02)
        return True

    def _room(self, capture: Capture, size: int) -> bool:
        if self.account.reserve(capture.part, size):
            return True
        self.slabs.give_up(size)
        return self.account.reserve(capture.part, size)

    def _under_way(self) -> int:
        """Bytes of the captures that still want rows."""
        with self._lock:
            requests = [capture.request for capture in self._open]
        return sum(in_pages(reserved_bytes(request.tokens, request.spec)) for request in requests)

    def _failed(self, capture: Capture, reason: str) -> None:
        self.counts.failed += 1
        if capture.board is not None:
            capture.board.say_failed(0, reason)
        self._thread.submit(lambda: self._discard(capture))
        request = capture.request
        self._record_failure(request.capture_id, request.request_id, "failed", reason, reason.startswith(SPOOL_FULL))

    def _record_failure(
        self, capture_id: str, request_id: str, kind: Literal["refused", "failed"], reason: str, retriable: bool
    ) -> None:
        reason = shortened(reason, MOST_REASON)
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
        self._thread.submit(lambda: self._failures.write(failure))

    # -- on the writer's thread -------------------------------------------------------------------------------

    def _lay_out(self, capture: Capture) -> None:
        request = capture.request
        try:
            # It may be complete already: a later stage may be the only one with rows to hand over.
            if not capture.failed:
                self._failures.forget(request.capture_id)
                capture.dump = self._dump_of(capture)
                if capture.board is not None:
                    capture.board.say_laid_out(capture.part)
        except Exception as error:
            self._give_up(capture, _reason(error))
        finally:
            capture.laid_out.set()

    def _dump_of(self, capture: Capture) -> DumpFile:
        request, file = capture.request, capture.file
        capture.file = None
        try:
            return self._new_dump(request, capture.part, file)
        except OSError as error:
            if error.errno not in NO_ROOM or not self.slabs.idle_bytes:
                raise
        self.slabs.give_up(self.account.limit)  # the file system is fuller than the quota knows
        return self._new_dump(request, capture.part, None)

    def _new_dump(self, request: CaptureRequest, part: Path, file: MappedFile | None) -> DumpFile:
        labelled = self._nonfinite == "label"
        return DumpFile(
            part, request.capture_id, request.request_id, request.spec, request.input_ids, labelled=labelled, file=file
        )

    def _give_up(self, capture: Capture, reason: str) -> None:
        """As :meth:`fail`, also where this stage had handed over all that it has."""
        with self._lock:
            over = capture.failed
            capture.open, capture.failed = False, True
            self._open.discard(capture)
        if not over:
            self._failed(capture, reason)

    def _complete(self, capture: Capture) -> None:
        if capture.failed:
            return
        if self._stages == 1:
            self._check(capture, RowFaults(), 0)
        else:
            self._handed_over.append((capture, time.monotonic() + HANDOVER_SECONDS))

    def _poll(self) -> bool:
        """Publish what all stages have filled, and end what one of them gave up."""
        for entry in list(self._handed_over):
            capture, deadline = entry
            assert capture.board is not None
            failure = capture.board.failure(self._stages)
            complete = failure is None and capture.board.complete(self._stages)
            if not complete and failure is None and time.monotonic() > deadline:
                failure = f"a later pipeline stage did not hand over its rows within {HANDOVER_SECONDS:.0f} s"
            if complete:
                self._check(capture, RowFaults(), 0)
            elif failure is not None:
                self._failed(capture, failure)
            if complete or failure is not None:
                self._handed_over.remove(entry)
        return bool(self._handed_over)

    def _check(self, capture: Capture, faults: RowFaults, start: int) -> None:
        """Look at a block of rows; behind the last one, publish."""
        dump, tokens = capture.dump, capture.request.tokens
        assert dump is not None  # only a laid-out capture gets rows
        stop = start + max(1, CHECK_BYTES // dump.spec.bytes_per_token)
        faults.look(_named_rows(dump, start, stop), start)
        if stop < tokens:
            self._thread.submit(lambda: self._check(capture, faults, stop))
        elif faults.nonfinite and self._nonfinite == "refuse":
            self._failed(capture, _refusal(faults, tokens))
        else:
            self._publish(capture, dump, faults)

    def _publish(self, capture: Capture, dump: DumpFile, faults: RowFaults) -> None:
        request = capture.request
        dump.label(nonfinite=faults.nonfinite, zero=faults.zero)
        final = dump_path(self.directory, request.capture_id)
        try:
            if dump.publish(final):
                self.account.rename(capture.part, final, dump.bytes)
                self.slabs.keep(dump.file, final)
                self._failures.forget(request.capture_id)
                self._count(request, faults)
            else:
                self.account.release(capture.part)
                self.counts.duplicates += 1
        except OSError as error:
            self._failed(capture, _reason(error))
        capture.dump = None
        if capture.board is not None:
            capture.board.remove()

    def _count(self, request: CaptureRequest, faults: RowFaults) -> None:
        self.counts.published += 1
        self.counts.tokens += request.tokens
        self.counts.bytes += request.tokens * request.spec.bytes_per_token
        self.counts.nonfinite_rows += faults.nonfinite
        self.counts.zero_rows += faults.zero
        if faults.nonfinite or faults.zero:
            self.last_error = (
                f"{request.capture_id} was published with {faults.nonfinite} tokens that have NaN or Inf "
                f"and {faults.zero} that have a row of zeros"
            )
            logger.warning("sglang-capture: %s", self.last_error)

    def _discard(self, capture: Capture) -> None:
        capture.dump = capture.file = None
        self.account.release(capture.part)
        capture.part.unlink(missing_ok=True)
        if capture.board is not None:
            capture.board.remove()

    def _keep_house(self) -> None:
        self.account.look()
        self.slabs.tidy()
        self._failures.write_again()
        super()._keep_house()


def _named_rows(dump: DumpFile, start: int, stop: int) -> Iterator[tuple[list[str], torch.Tensor]]:
    yield [f"index {index}" for index in dump.spec.layers], dump.hidden_states[start:stop]
    for key, rows in dump.last_hidden.items():
        yield [key], rows[start:stop, None]


def _refusal(faults: RowFaults, tokens: int) -> str:
    return (
        f"{faults.nonfinite} of {tokens} tokens have NaN or Inf (first: {faults.first}); "
        "SGLANG_CAPTURE_NONFINITE=label would publish it, labelled"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return f"{SPOOL_FULL}: the file system has no room ({error.strerror})"
    return f"the spool cannot be written: {error}"
