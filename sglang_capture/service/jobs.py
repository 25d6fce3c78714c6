"""The jobs of a service: started, cancelled, and taken up again after a restart.

A job keeps a copy of its rows in ``<data>/jobs/<id>.jsonl`` until it ends: the file it was given may change or go away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi.concurrency import run_in_threadpool

from sglang_capture.catalog import Catalog, JobRow
from sglang_capture.catalog.tables import JobState
from sglang_capture.errors import CaptureError
from sglang_capture.service.asks import AskReader, expected_spec
from sglang_capture.service.job_run import JobRun
from sglang_capture.service.models import JobErrorRecord, JobOptions, JobRecord
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.sender import Sender

_SUFFIX = ".jsonl"
_PART_SUFFIX = ".part"

_log = logging.getLogger(__name__)


class Jobs:
    """The jobs of one data directory."""

    def __init__(self, directory: Path, catalog: Catalog, monitor: SpoolMonitor, reader: AskReader, sender: Sender):
        self._directory = directory
        self._catalog = catalog
        self._monitor = monitor
        self._reader = reader
        self._sender = sender
        self._runs: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    async def create(self, source: str, chunks: AsyncIterator[bytes], options: JobOptions) -> JobRecord:
        """Keep the rows that ``chunks`` bring, and start capturing them.

        Raises:
            ProblemError: no server with the plugin runs, it has no such layers, or there is no row.
        """
        layers = None if options.layers is None else tuple(options.layers)
        expected_spec(self._monitor.require(), layers, options.last_hidden)
        job_id = f"job-{uuid.uuid4().hex[:12]}"
        part = self._directory / f"{job_id}{_PART_SUFFIX}"
        try:
            await _store(part, chunks)
            rows = await run_in_threadpool(_count_rows, part)
            if not rows:
                raise ProblemError("invalid-request", f"{source} holds no row: send one JSON object a line")
            part.rename(self._path(job_id))
        finally:
            part.unlink(missing_ok=True)
        row = await run_in_threadpool(
            self._catalog.jobs.add, job_id, source=source, rows=rows, options=options.model_dump()
        )
        self._start(row)
        return await self.record(job_id)

    async def record(self, job_id: str, *, errors: int = 0, after: int = 0) -> JobRecord:
        """How far a job is, with up to ``errors`` of its failed lines behind line ``after``.

        Raises:
            ProblemError: there is no such job.
        """
        row = await run_in_threadpool(self._catalog.jobs.get, job_id)
        if row is None:
            raise ProblemError("unknown-job", f"there is no job {job_id:.80}; GET /capture/jobs lists them")
        record = self.describe(row)
        if errors:
            failed = await run_in_threadpool(self._catalog.jobs.errors, job_id, after=after, limit=errors)
            record.errors = [JobErrorRecord.of(error) for error in failed]
        return record

    def describe(self, row: JobRow) -> JobRecord:
        """The record of a row, with what only a running job knows."""
        run = self._runs.get(row.id)
        return JobRecord.of(row, run.progress, **run.live()) if run else JobRecord.of(row)

    async def cancel(self, job_id: str) -> JobRecord:
        """Stop a job; what it captured stays. One that has ended is left as it is. Raises as :meth:`record`."""
        if task := self._tasks.get(job_id):
            self._cancelled.add(job_id)
            task.cancel()
            await asyncio.wait([task])
        return await self.record(job_id)

    async def resume(self) -> None:
        """Take up the jobs that a stopped service left, and clear what others left."""
        running = await run_in_threadpool(self._catalog.jobs.running)
        kept = {self._path(row.id) for row in running}
        for path in await run_in_threadpool(lambda: list(self._directory.iterdir())):
            if path not in kept and path.suffix in (_SUFFIX, _PART_SUFFIX):
                path.unlink(missing_ok=True)
        for row in running:
            _log.info("going on with %s behind line %d", row.id, row.watermark)
            self._start(row)

    async def stop(self) -> None:
        """Break all jobs off; they go on at the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, row: JobRow) -> None:
        self._runs[row.id] = JobRun(row, self._path(row.id), self._catalog, self._reader, self._sender)
        self._tasks[row.id] = asyncio.create_task(self._drive(row.id), name=row.id)

    async def _drive(self, job_id: str) -> None:
        try:
            await self._runs[job_id].run()
            await self._end(job_id, "done")
        except asyncio.CancelledError:
            if job_id not in self._cancelled:
                raise
            await self._end(job_id, "cancelled")
        except CaptureError as error:
            await self._end(job_id, "failed", str(error))
        except Exception as error:
            _log.exception("%s failed", job_id)
            await self._end(job_id, "failed", f"{type(error).__name__}: {error}")
        finally:
            self._runs.pop(job_id, None)
            self._tasks.pop(job_id, None)
            self._cancelled.discard(job_id)

    async def _end(self, job_id: str, state: JobState, problem: str = "") -> None:
        await run_in_threadpool(self._catalog.jobs.end, job_id, state, problem)
        self._path(job_id).unlink(missing_ok=True)

    def _path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}{_SUFFIX}"


async def _store(path: Path, chunks: AsyncIterator[bytes]) -> None:
    with contextlib.closing(await run_in_threadpool(path.open, "wb")) as file:
        async for chunk in chunks:
            await run_in_threadpool(file.write, chunk)


def _count_rows(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
