"""When to pack: the triggers, and packing on demand.

A spec's captures are packed when they fill a shard, when one of them has waited long enough, when the spool is more
than half full or a request is held back for want of room, and when a client asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from fastapi.concurrency import run_in_threadpool

from sglang_capture.catalog import Catalog, ShardRow, SpooledGroup
from sglang_capture.service.datasets import Datasets
from sglang_capture.service.metrics import Metrics
from sglang_capture.service.monitor import Moment, SpoolMonitor
from sglang_capture.service.packing import ShardPacking, differing, mixed
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.shards import DatasetError

_TICK_SECONDS = 0.25
"""How often the triggers are looked at."""
_PAUSE_SECONDS = 5.0
"""How long after a pack that failed (a full disk, say) before the next try."""
_CROWDED = 0.5
"""The part of its quota above which a spool is emptied without waiting for whole shards."""

_log = logging.getLogger(__name__)


class Packer:
    """Packs the spooled captures of one catalog, one shard at a time."""

    def __init__(
        self,
        settings: ServiceSettings,
        catalog: Catalog,
        datasets: Datasets,
        monitor: SpoolMonitor,
        metrics: Metrics,
    ):
        self.problem = ""
        self.writing = asyncio.Lock()
        """Held while a shard is written; who wants to remove a dump takes it."""
        self._settings = settings
        self._catalog = catalog
        self._monitor = monitor
        self._metrics = metrics
        self._packing = ShardPacking(settings.dir, catalog, datasets, settings.shard_size, settings.pack_count)
        self._room_wanted = False
        self._last_pack: Moment | None = None

    def make_room(self) -> None:
        """A request is held back: pack whatever is spooled."""
        self._room_wanted = True

    async def run(self) -> None:
        while True:
            try:
                await self._pack_what_is_due()
                self.problem = ""
            except (DatasetError, ProblemError) as error:
                self.problem = f"packing fails: {error}"
                _log.error("packing fails, and is tried again in %g s: %s", _PAUSE_SECONDS, error)
                await asyncio.sleep(_PAUSE_SECONDS)
            await asyncio.sleep(_TICK_SECONDS)

    async def pack(self, *, ids: Sequence[str] | None = None, dataset: str | None = None) -> list[ShardRow]:
        """Pack now what is spooled (of ``ids``); captures that are packed already stay where they are.

        Raises:
            ProblemError: an id is unknown or has no dump; captures of several specs were to go into ``dataset``, or of
                another spec than it holds (``mixed-specs``).
            DatasetError: a shard cannot be written.
        """
        if ids is not None:
            await run_in_threadpool(self._check_ids, ids)
        specs = await run_in_threadpool(self._catalog.captures.spooled_specs, ids)
        if dataset is not None and len(specs) > 1:
            raise mixed(dataset, differing(list(specs.values())))
        return [shard for digest in specs for shard in await self._pack_group(digest, dataset, ids)]

    async def _pack_what_is_due(self) -> None:
        crowded = self._crowded()
        for group in await run_in_threadpool(self._catalog.captures.spooled_groups):
            if crowded or self._due(group):
                await self._pack_group(group.spec_digest, None, None)

    def _due(self, group: SpooledGroup) -> bool:
        return (
            group.size >= self._settings.shard_size
            or group.captures >= self._settings.pack_count
            or not 0 <= time.time() - group.oldest < self._settings.pack_age  # before: the clock was set back
        )

    def _crowded(self) -> bool:
        """Whether room is short, judged by a status that knows of the last pack: else one pack would follow another."""
        status = self._monitor.status
        if status is None or (self._last_pack is not None and not self._monitor.knows_of(self._last_pack)):
            return False
        wanted, self._room_wanted = self._room_wanted, False
        return wanted or status.used_bytes > _CROWDED * status.quota_bytes

    async def _pack_group(self, spec_digest: str, dataset: str | None, ids: Sequence[str] | None) -> list[ShardRow]:
        shards = []
        while shard := await self._pack_shard(spec_digest, dataset, ids):
            shards.append(shard)
        return shards

    async def _pack_shard(self, spec_digest: str, dataset: str | None, ids: Sequence[str] | None) -> ShardRow | None:
        async with self.writing:
            started = time.perf_counter()
            try:
                shard = await run_in_threadpool(self._packing.pack_next, spec_digest, dataset=dataset, ids=ids)
            except DatasetError:
                self._metrics.pack_failures.inc()
                raise
            finally:
                self._last_pack = Moment.now()
        if shard is not None:
            self._metrics.pack_seconds.observe(time.perf_counter() - started)
            self._metrics.packed_bytes.inc(shard.size)
            self._metrics.packed_samples.inc(shard.samples)
        return shard

    def _check_ids(self, ids: Sequence[str]) -> None:
        states = self._catalog.captures.states(ids)
        if unknown := [name for name in ids if name not in states]:
            raise ProblemError("unknown-capture", f"there is no capture {', '.join(unknown[:10])}")
        if without := [name for name in ids if states[name] in ("pending", "failed")]:
            found = ", ".join(f"{name} is {states[name]}" for name in without[:10])
            raise ProblemError("no-tensors", f"only captures with a dump can be packed; {found}")
