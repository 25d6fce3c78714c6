"""One job while it runs: a bounded number of rows in flight, and how far it is.

How far it is stands in the catalog as a watermark: all lines up to it are settled. A service that starts again goes on
behind the watermark; rows that had been captured beyond it are found captured, so nothing is done twice.

While the server is away a job waits for it, however long that takes: a big model needs many minutes to start. What
fails for another reason is tried a few times, and then the line has an error and the job goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi.concurrency import run_in_threadpool

from sglang_capture.catalog import Catalog, JobError, JobProgress, JobRow
from sglang_capture.prompts import RowError, read_jsonl
from sglang_capture.service.asks import Ask, AskReader
from sglang_capture.service.models import JobOptions
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.sender import Sender

_ATTEMPTS = 3
_PAUSE_SECONDS = 2.0
_AWAY_SECONDS = 2.0
_AWAY = frozenset({"no-plugin", "engine-unreachable"})
"""Problems that no row is to blame for: the job waits until they are gone."""
_FATAL = frozenset({"no-tokenizer"})
"""Problems that every row would have: the job ends."""
_READ_ROWS = 16
"""Rows read and tokenized at a time on a worker thread."""
_SAVE_SECONDS = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Outcome:
    """What came of one line."""

    progress: JobProgress
    error: JobError | None = None


class JobRun:
    """One running job.

    Args:
        path: its rows; lines up to the watermark of ``row`` are skipped.
    """

    def __init__(self, row: JobRow, path: Path, catalog: Catalog, reader: AskReader, sender: Sender):
        self.id = row.id
        self.in_flight = 0
        self.waiting = ""
        self._path = path
        self._options = JobOptions(**row.options)
        self._catalog = catalog
        self._reader = reader
        self._sender = sender
        self._saved = JobProgress(row.watermark, row.captured, row.reused, row.failed, row.tokens)
        self._read_to = row.watermark
        self._settled: dict[int, _Outcome] = {}
        self._open: set[int] = set()
        self._rows = row.rows
        self._started = time.monotonic()
        self._done_before = row.captured + row.reused + row.failed

    @property
    def progress(self) -> JobProgress:
        """The counts of all lines settled so far, those beyond the watermark too."""
        outcomes = [outcome.progress for outcome in self._settled.values()]
        return _sum(self._saved, *outcomes)

    def live(self) -> dict[str, Any]:
        """What only a running job knows, by the field names of a job's record."""
        counts = self.progress
        done = counts.captured + counts.reused + counts.failed
        rate = (done - self._done_before) / max(time.monotonic() - self._started, 1e-3)
        return {
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "rows_per_second": round(rate, 3),
            "seconds_left": round((self._rows - done) / rate, 1) if rate > 0 else None,
        }

    async def run(self) -> None:
        """Capture every row; returns when each has a capture or an error.

        Raises:
            ProblemError: no row can be captured at all (``no-tokenizer``).
            UsageError: the rows cannot be read.
        """
        slots = asyncio.Semaphore(self._options.concurrency)
        saver = asyncio.create_task(self._save_now_and_then())
        tasks: set[asyncio.Task[None]] = set()

        def settled(task: asyncio.Task[None]) -> None:
            slots.release()
            tasks.discard(task)

        try:
            async for line, ask in self._asks():
                await slots.acquire()
                self._open.add(line)
                task = asyncio.create_task(self._settle(line, ask))
                tasks.add(task)
                task.add_done_callback(settled)
            while tasks:
                await asyncio.wait(tasks)
        finally:
            saver.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(saver, *tasks, return_exceptions=True)
            await self._save()

    async def _asks(self) -> AsyncIterator[tuple[int, Ask | ProblemError]]:
        parsed = self._parse()
        while batch := await run_in_threadpool(lambda: list(itertools.islice(parsed, _READ_ROWS))):
            for line, ask in batch:
                if isinstance(ask, ProblemError) and ask.kind in _FATAL:
                    raise ask
                yield line, ask
                self._read_to = line

    def _parse(self) -> Iterator[tuple[int, Ask | ProblemError]]:
        for line, row in read_jsonl(self._path):
            if line <= self._saved.watermark:
                continue
            try:
                if isinstance(row, RowError):
                    raise ProblemError("invalid-row", str(row))
                options = self._options
                yield line, self._reader.read(row, options, layers=options.layers, last_hidden=options.last_hidden)
            except ProblemError as problem:
                yield line, problem

    async def _settle(self, line: int, ask: Ask | ProblemError) -> None:
        self.in_flight += 1
        try:
            self._settled[line] = await self._outcome(line, ask)
            self._open.discard(line)
        finally:
            self.in_flight -= 1

    async def _outcome(self, line: int, ask: Ask | ProblemError) -> _Outcome:
        if isinstance(ask, ProblemError):
            return _error(line, None, ask.detail)
        try:
            return await self._capture(line, ask)
        except Exception as error:  # a fault of ours costs a line, not the job
            _log.exception("line %d of %s failed", line, self.id)
            return _error(line, ask.capture_id, f"{type(error).__name__}: {error}")

    async def _capture(self, line: int, ask: Ask) -> _Outcome:
        attempt = 1
        while True:
            try:
                captured = await self._sender.capture(ask)
                tokens = captured.row.tokens or 0
                if captured.reused:
                    return _Outcome(JobProgress(reused=1, tokens=tokens))
                return _Outcome(JobProgress(captured=1, tokens=tokens))
            except ProblemError as problem:
                if problem.kind in _AWAY:
                    await self._wait_for_server(problem)
                elif problem.retriable and attempt < _ATTEMPTS:
                    await asyncio.sleep(_PAUSE_SECONDS * attempt)
                    attempt += 1
                else:
                    return _error(line, ask.capture_id, problem.detail)

    async def _wait_for_server(self, problem: ProblemError) -> None:
        self.waiting = problem.detail
        await asyncio.sleep(_AWAY_SECONDS)
        self.waiting = ""

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await self._save()

    async def _save(self) -> None:
        """Move the watermark up to the first line that is still open, and write down what is below it."""
        watermark = min(self._open, default=self._read_to + 1) - 1
        lines = [line for line in self._settled if line <= watermark]
        outcomes = [self._settled[line] for line in lines]
        if not lines:
            return
        saved = replace(_sum(self._saved, *(outcome.progress for outcome in outcomes)), watermark=watermark)
        errors = [outcome.error for outcome in outcomes if outcome.error]
        await run_in_threadpool(self._catalog.jobs.advance, self.id, saved, errors)
        self._saved = saved
        for line in lines:
            del self._settled[line]


def _error(line: int, capture_id: str | None, reason: str) -> _Outcome:
    return _Outcome(JobProgress(failed=1), JobError(line, capture_id, reason))


def _sum(first: JobProgress, *others: JobProgress) -> JobProgress:
    return JobProgress(
        watermark=first.watermark,
        captured=first.captured + sum(other.captured for other in others),
        reused=first.reused + sum(other.reused for other in others),
        failed=first.failed + sum(other.failed for other in others),
        tokens=first.tokens + sum(other.tokens for other in others),
    )
