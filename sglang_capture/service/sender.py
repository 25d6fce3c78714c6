"""One capture, from the request to its record.

A capture is under way once at most: whoever asks for the same while it is, waits with the first. What is there already
is not made again, nor are its answers written again. The record is written before the request is sent, so that whatever
happens afterwards is found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi.concurrency import run_in_threadpool

from sglang_capture import spool
from sglang_capture.catalog import CaptureRow, Catalog, FailureFacts, origin
from sglang_capture.catalog.tables import FailureKind
from sglang_capture.client import EngineError, EngineUnreachable
from sglang_capture.prompts import Prompt
from sglang_capture.service.asks import Ask
from sglang_capture.service.author import Assignment, Author
from sglang_capture.service.background import wait_briefly
from sglang_capture.service.budget import SpoolBudget
from sglang_capture.service.engine import Engine
from sglang_capture.service.indexer import Arrivals, Indexer
from sglang_capture.service.metrics import Metrics
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.spec import CaptureSpec

_ATTEMPTS = 6
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0
_WRITTEN_KEPT = 256
"""Most conversations that were written and could not be captured (the spool is full, say), kept for another try."""
_LOOK_SECONDS = 0.25
"""How long to wait for an event before looking into the spool all the same."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """A capture that is there; ``reused`` if it was before it was asked for."""

    row: CaptureRow
    reused: bool


@dataclass(frozen=True)
class _Flight:
    digest: str
    spec_digest: str
    task: asyncio.Task[Captured]


class Sender:
    """Makes captures on the engine that the spool belongs to."""

    def __init__(
        self,
        settings: ServiceSettings,
        catalog: Catalog,
        monitor: SpoolMonitor,
        budget: SpoolBudget,
        engine: Engine,
        author: Author,
        indexer: Indexer,
        arrivals: Arrivals,
        metrics: Metrics,
    ):
        self._settings = settings
        self._catalog = catalog
        self._monitor = monitor
        self._budget = budget
        self._engine = engine
        self._author = author
        self._indexer = indexer
        self._arrivals = arrivals
        self._metrics = metrics
        self._flights: dict[str, _Flight] = {}
        self._written: dict[str, Prompt] = {}

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def is_under_way(self, capture_id: str) -> bool:
        return capture_id in self._flights

    async def capture(self, ask: Ask) -> Captured:
        """The capture of ``ask``, made now unless it is there.

        Raises:
            ProblemError: it cannot be made; the kind says why, the record keeps the reason.
        """
        if found := await self._existing(ask):
            return Captured(found, reused=True)
        spec = ask.spec(self._monitor.require())
        flight = self._flights.get(ask.capture_id)
        if flight is None:
            task = asyncio.create_task(self._fly(ask, spec), name=f"capture {ask.capture_id}")
            flight = self._flights[ask.capture_id] = _Flight(ask.digest, spec.digest, task)
            task.add_done_callback(lambda _: self._landed(ask.capture_id))
        elif (flight.digest, flight.spec_digest) != (ask.digest, spec.digest):
            raise _conflict(ask, "another request for it is under way")
        return await asyncio.shield(flight.task)

    async def stop(self) -> None:
        """Break off what is under way; its records are found pending at the next start."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, capture_id: str) -> None:
        task = self._flights.pop(capture_id).task
        if task.cancelled():
            outcome = "cancelled"
        else:
            error = task.exception()
            outcome = error.kind if isinstance(error, ProblemError) else "fault" if error else "captured"
        self._metrics.sent.labels(outcome).inc()

    async def _existing(self, ask: Ask) -> CaptureRow | None:
        """The record of a capture of the same request that has tensors.

        Raises:
            ProblemError: the id belongs to another one (``id-conflict``).
        """
        row = await run_in_threadpool(self._catalog.captures.get, ask.capture_id)
        if row is None or row.state not in ("spooled", "packed"):
            return None
        return self._its_own(ask, row)

    def _its_own(self, ask: Ask, row: CaptureRow) -> CaptureRow:
        """A record with tensors, if they are those that are asked for. Raises as :meth:`_existing`."""
        if not ask.is_of(row):
            why = f"it is {row.state} and of another prompt, loss mask or origin"
            raise _conflict(ask, why, packed=row.state == "packed")
        if differences := self._spec_differences(ask, row):
            raise _conflict(ask, _another_spec(row, differences), packed=row.state == "packed")
        return row

    def _spec_differences(self, ask: Ask, row: CaptureRow) -> list[str]:
        """In what the capture that is there differs from what is wanted, as far as that is known without a server."""
        if row.spec is None:
            return []
        there = CaptureSpec.from_json(row.spec.spec)
        if self._monitor.problem() is None and self._monitor.status is not None:
            return there.differences(ask.spec(self._monitor.status))
        wanted = {"layers": ask.layers, "last_hidden": ask.last_hidden}
        return there.differences(there.model_copy(update={k: v for k, v in wanted.items() if v is not None}))

    async def _fly(self, ask: Ask, spec: CaptureSpec) -> Captured:
        if ask.assignment is not None:
            return await self._fly_written(ask, ask.assignment, spec)
        return await self._fly_as_it_is(ask, spec)

    async def _fly_written(self, ask: Ask, assignment: Assignment, spec: CaptureSpec) -> Captured:
        """What was written stays for the next try of the same request, until it is captured."""
        prompt = self._written.pop(ask.digest, None)
        if prompt is None:
            prompt = await self._author.write(ask.prompt, assignment, spec.vocab_size)
        try:
            return await self._fly_as_it_is(replace(ask, prompt=prompt), spec)
        except BaseException:
            if len(self._written) < _WRITTEN_KEPT:
                self._written[ask.digest] = prompt
            raise

    async def _fly_as_it_is(self, ask: Ask, spec: CaptureSpec) -> Captured:
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            size, patience = ask.most_bytes(spec), self._settings.hold_seconds
            async with self._budget.room(size, patience, guess=not ask.is_tokenized):
                row = await self._attempt(ask, spec)
            if row.state in ("spooled", "packed"):
                return Captured(self._its_own(ask, row), reused=False)
            if not row.retriable or attempt == _ATTEMPTS:
                raise _failed(row)
            _log.info("%s failed and is tried again in %g s: %s", row.id, pause, row.reason)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, ask: Ask, spec: CaptureSpec) -> CaptureRow:
        """Send once; the record afterwards."""
        if spool.dump_path(self._settings.dir, ask.capture_id).exists():  # an interrupted attempt left it
            await self._indexer.index([ask.capture_id])
        request_id = origin.new_request_id(ask.sent)
        with self._arrivals.expect(ask.capture_id, request_id) as event:
            row = await run_in_threadpool(self._begin, ask, spec)
            if row.state != "pending":
                return await self._record(ask)
            try:
                await self._engine.client().capture(
                    ask.prompt, layers=ask.layers, last_hidden=ask.last_hidden, request_id=request_id
                )
            except EngineUnreachable as error:
                await self._record_failure(ask, "unreachable", str(error), True)
                raise ProblemError("engine-unreachable", str(error)) from error
            except EngineError as error:
                return await self._after_engine_error(ask, error)
            return await self._await_record(ask, event)

    def _begin(self, ask: Ask, spec: CaptureSpec) -> CaptureRow:
        before = self._catalog.captures.get(ask.capture_id)
        row = self._catalog.captures.begin(
            ask.capture_id,
            request_digest=ask.digest,
            sent=ask.sent,
            spec=spec,
            loss_mask=ask.loss_mask,
            metadata=ask.prompt.metadata,
        )
        if row.state == "pending":  # what an earlier try left goes; a dump that comes just now is somebody's
            spool.failure_path(self._settings.dir, ask.capture_id).unlink(missing_ok=True)
            if before is not None and before.failure == "unreadable":
                spool.dump_path(self._settings.dir, ask.capture_id).unlink(missing_ok=True)
        return row

    async def _after_engine_error(self, ask: Ask, error: EngineError) -> CaptureRow:
        """What the plugin says of an aborted request is better than what the engine says; else the latter stands."""
        await self._indexer.index([ask.capture_id])
        row = await self._record(ask)
        if row.state == "pending":
            row = await self._record_failure(ask, "failed", str(error), error.retriable)
        if row.state == "failed" and not row.retriable:
            raise ProblemError("engine-error", row.reason or str(error))
        return row

    async def _await_record(self, ask: Ask, event: asyncio.Event) -> CaptureRow:
        """The record once the spool shows a dump or a failure.

        Raises:
            ProblemError: neither appears in time (``capture-timeout``).
        """
        patience = self._settings.appear_seconds
        deadline = time.monotonic() + patience
        while True:
            await self._indexer.index([ask.capture_id])
            row = await self._record(ask)
            if row.state != "pending":
                return row
            if time.monotonic() > deadline:
                detail = (
                    f"SGLang at {self._engine.url} answered, and neither a dump nor a failure of {ask.capture_id} "
                    f"appeared in {self._settings.dir} within {patience:g} s: is this the server whose plugin writes "
                    "there, and was it started with the same SGLANG_CAPTURE_DIR?"
                )
                await self._record_failure(ask, "timeout", detail, True)
                raise ProblemError("capture-timeout", detail)
            await wait_briefly(event, _LOOK_SECONDS)

    async def _record(self, ask: Ask) -> CaptureRow:
        row = await run_in_threadpool(self._catalog.captures.get, ask.capture_id)
        if row is None:
            raise ProblemError("unknown-capture", f"{ask.capture_id} was forgotten while it was under way")
        return row

    async def _record_failure(self, ask: Ask, kind: FailureKind, reason: str, retriable: bool) -> CaptureRow:
        facts = FailureFacts(ask.capture_id, kind, reason, retriable)
        await run_in_threadpool(self._catalog.captures.record_failures, [facts])
        return await self._record(ask)


def _another_spec(row: CaptureRow, differences: Sequence[str]) -> str:
    return f"it is {row.state} with another spec (what it has / what is asked for now: {'; '.join(differences)})"


def _conflict(ask: Ask, why: str, *, packed: bool = False) -> ProblemError:
    advice = (
        "A packed capture cannot be forgotten: give other ids, or have a service with another --data directory take it"
        if packed
        else "Give another capture_id, or forget the old capture first"
    )
    return ProblemError("id-conflict", f"the id {ask.capture_id} is taken: {why}. {advice}")


def _failed(row: CaptureRow) -> ProblemError:
    kind = "capture-failed"
    if row.failure in ("refused", "mask"):
        kind = "spool-full" if row.retriable else "capture-refused"
    return ProblemError(kind, f"{row.id}: {row.reason}")
