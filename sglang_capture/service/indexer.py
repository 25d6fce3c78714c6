"""From the spool into the catalog: what the plugin publishes is noticed, checked and recorded.

File-system events bring dumps in within milliseconds; since events can be lost (a full queue, a directory that was made
anew), everything is also looked over every few seconds. Both ways end in :meth:`Indexer.index`, which may be told of
the same file any number of times.

A dump that cannot be read is recorded as failed and left where it is, for whoever wants to know why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastapi.concurrency import run_in_threadpool
from watchfiles import Change, awatch

from sglang_capture import spool
from sglang_capture.catalog import Catalog, DumpFacts, FailureFacts
from sglang_capture.claim import ServiceClaim
from sglang_capture.dump import DumpError
from sglang_capture.service.datasets import Datasets
from sglang_capture.service.metrics import Metrics
from sglang_capture.service.spooled import read_spooled
from sglang_capture.spool import Failure, SpoolError

_RESCAN_SECONDS = 5.0
_BATCH = 256
"""Dumps read and recorded in one transaction: short enough that nobody waits long for the catalog."""
_FAILURE_FILE_SECONDS = 3600.0
"""How long a failure's file stays in the spool once the catalog has it."""

_log = logging.getLogger(__name__)


class Arrivals:
    """Who waits for which capture to be recorded."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[str, asyncio.Event]] = {}

    @contextlib.contextmanager
    def expect(self, capture_id: str, request_id: str) -> Iterator[asyncio.Event]:
        """An event that is set each time something about the capture was recorded; one waiter for each id.

        Args:
            request_id: of the request that is waited for.
        """
        event = asyncio.Event()
        self._waiting[capture_id] = (request_id, event)
        try:
            yield event
        finally:
            del self._waiting[capture_id]

    def announce(self, ids: Iterable[str]) -> None:
        for capture_id in ids:
            if waiting := self._waiting.get(capture_id):
                waiting[1].set()

    def concerns(self, failure: Failure) -> bool:
        """Whether a failure ends what is waited for: an earlier request of the same id may fail late, and others may
        mark a request with it. What nobody waits for concerns everybody."""
        waiting = self._waiting.get(failure.capture_id)
        return waiting is None or not failure.request_id or failure.request_id.startswith(waiting[0])


class Indexer:
    """Keeps the catalog in step with one spool."""

    def __init__(
        self,
        directory: Path,
        catalog: Catalog,
        datasets: Datasets,
        arrivals: Arrivals,
        metrics: Metrics,
    ):
        self.directory = directory
        self.claim = ServiceClaim(directory)
        self.problem = ""
        self._catalog = catalog
        self._datasets = datasets
        self._arrivals = arrivals
        self._metrics = metrics
        self._one_at_a_time = asyncio.Lock()
        self._wanted: set[str] = set()
        self._bad: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await self.scan()
            if self._trusted():
                await self._watch()
            else:
                await asyncio.sleep(1)

    async def index(self, ids: Iterable[str]) -> None:
        """Record what the spool now holds of these captures.

        What is asked for while a transaction runs goes into the next one together, whoever asked.
        """
        mine = set(ids)
        self._wanted |= mine
        async with self._one_at_a_time:
            while not mine.isdisjoint(self._wanted):
                batch = list(itertools.islice(self._wanted, _BATCH))
                self._wanted.difference_update(batch)
                seen = await run_in_threadpool(self._index, batch)
                self._arrivals.announce(seen)

    async def scan(self) -> None:
        """Look the whole spool over: what is new, and which dumps are gone without having been packed."""
        fresh, vanished = await run_in_threadpool(self._compare)
        for start in range(0, len(fresh), _BATCH):  # what is asked for meanwhile need not wait for all of them
            await self.index(fresh[start : start + _BATCH])
        if vanished:
            reason = "its dump vanished from the spool before it was packed"
            lost = await run_in_threadpool(self._catalog.captures.lose, vanished, "vanished", reason)
            self._arrivals.announce(lost)
            if lost:
                _log.warning("%d dumps vanished from %s before they were packed", len(lost), self.directory)

    async def _watch(self) -> None:
        """Index what events tell of, until the directory is no longer the one that is watched."""
        watched = _identity(self.directory)
        scan_at = 0.0
        # No filter: what it drops would not end a wait either, and the status changes every second.
        async for changes in awatch(
            self.directory,
            watch_filter=None,
            recursive=False,
            debounce=200,
            step=10,
            rust_timeout=500,
            yield_on_timeout=True,
        ):
            await self.index(_published(changes))
            if time.monotonic() >= scan_at:
                await self.scan()
                scan_at = time.monotonic() + _RESCAN_SECONDS
            if watched is None or _identity(self.directory) != watched:
                return

    def _trusted(self) -> bool:
        """Whether there is a spool that is ours to read; what is wrong otherwise is the indexer's problem."""
        try:
            self.claim.hold()
        except SpoolError as error:
            self.problem = str(error)
            return False
        self.problem = ""
        return True

    def _compare(self) -> tuple[list[str], list[str]]:
        """The ids with something unrecorded, and those that are spooled in the catalog only."""
        dumps, failures = self._list()
        if not self.problem:
            spool.clear_probes(self.directory)
        # The catalog is asked after the directory: what is published in between has its file by then.
        spooled = self._catalog.captures.spooled_ids()
        vanished = [name for name in spooled - dumps if not spool.dump_path(self.directory, name).exists()]
        states = self._catalog.captures.states(failures - spooled)
        fresh = [name for name in dumps - spooled if not self._is_bad(name)]
        fresh += [name for name in failures - spooled if states.get(name) in (None, "pending")]
        for name in failures:
            path = spool.failure_path(self.directory, name)
            if states.get(name) == "failed" and time.time() - _mtime(path) / 1e9 > _FAILURE_FILE_SECONDS:
                path.unlink(missing_ok=True)
        return fresh, vanished

    def _is_bad(self, name: str) -> bool:
        """Whether a dump could not be read before, and is the same still."""
        return name in self._bad and self._bad[name] == _mtime(spool.dump_path(self.directory, name))

    def _list(self) -> tuple[set[str], set[str]]:
        """The ids of the dumps and of the failures; none where there is no spool."""
        if not self._trusted():
            return set(), set()
        try:
            return spool.ids(self.directory)
        except FileNotFoundError:
            return set(), set()

    def _index(self, ids: list[str]) -> list[str]:
        """Read and record; returns the ids that something was recorded of."""
        states = self._catalog.captures.states(ids)
        found = [facts for name in ids if states.get(name) != "spooled" and (facts := self._read(name))]
        dumps = [facts for facts in found if isinstance(facts, DumpFacts)]
        failures = [facts for facts in found if isinstance(facts, FailureFacts)]
        outcomes = self._catalog.captures.record_dumps(dumps) if dumps else {}
        if failures:
            self._catalog.captures.record_failures(failures)
        for failure in failures:
            self._metrics.indexed.labels(failure.kind).inc()
        for name, outcome in outcomes.items():
            self._metrics.indexed.labels(outcome).inc()
            if outcome in ("mask", "refused"):
                spool.remove(self.directory, name)
            elif outcome == "duplicate":
                self._remove_duplicate(name)
        return [facts.id for facts in found]

    def _read(self, name: str) -> DumpFacts | FailureFacts | None:
        path = spool.dump_path(self.directory, name)
        try:
            return read_spooled(self.directory, name)[1]
        except FileNotFoundError:
            failure = spool.read_failure(spool.failure_path(self.directory, name))
            if failure is None or not self._arrivals.concerns(failure):
                return None
            return FailureFacts(name, failure.kind, failure.reason, failure.retriable)
        except DumpError as error:
            self._bad[name] = _mtime(path)
            return FailureFacts(name, "unreadable", str(error))

    def _remove_duplicate(self, name: str) -> None:
        """A dump of a capture that is packed: left by a crash after packing, or captured twice. The first one stands.

        It is removed only where the shard is really there; else it may be the last copy.
        """
        row = self._catalog.captures.get(name)
        if row is not None and row.shard is not None and self._datasets.has(row.shard):
            spool.remove(self.directory, name)
        else:
            _log.warning("%s is packed, but its shard is missing: its dump is kept; restart the service", name)


def _published(changes: Iterable[tuple[Change, str]]) -> set[str]:
    """The captures that file-system events tell of."""
    names = (spool.id_of(Path(path)) for change, path in changes if change is not Change.deleted)
    return {name for name in names if name and not spool.is_probe(name)}


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
