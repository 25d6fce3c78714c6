"""All the parts of one service, put together, started and stopped in the order that crashes ask for."""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fastapi.concurrency import run_in_threadpool
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang_capture.catalog import Catalog
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.service.asks import AskReader
from sglang_capture.service.author import Author
from sglang_capture.service.background import Background
from sglang_capture.service.budget import SpoolBudget
from sglang_capture.service.datasets import Datasets
from sglang_capture.service.engine import Engine
from sglang_capture.service.indexer import Arrivals, Indexer
from sglang_capture.service.jobs import Jobs
from sglang_capture.service.metrics import PREFIX, Metrics
from sglang_capture.service.models import Health
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.packer import Packer
from sglang_capture.service.sender import Sender
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.service.tokenizers import Tokenizers

VERSION = importlib.metadata.version("sglang-capture")

_log = logging.getLogger(__name__)


class Service:
    """One service on one data directory. Build it, :meth:`start` it inside an event loop, :meth:`stop` it there.

    Raises:
        CaptureError: the data directory cannot be used, or another service uses it.
    """

    def __init__(self, settings: ServiceSettings):
        self.settings = settings
        self._lock = _lock(settings.data)
        try:
            self.catalog = Catalog(settings.catalog_url)
        except BaseException:
            self._lock.close()
            raise
        self.metrics = Metrics()
        self.monitor = SpoolMonitor(settings.dir)
        self.datasets = Datasets(settings.data, self.catalog)
        self.packer = Packer(settings, self.catalog, self.datasets, self.monitor, self.metrics)
        self.budget = SpoolBudget(self.monitor, self.packer.make_room)
        arrivals = Arrivals()
        self.indexer = Indexer(settings.dir, self.catalog, self.datasets, arrivals, self.metrics)
        self.engine = Engine(settings, self.monitor)
        tokenizers = Tokenizers(settings, self.monitor)
        self.reader = AskReader(tokenizers)
        self.sender = Sender(
            settings,
            self.catalog,
            self.monitor,
            self.budget,
            self.engine,
            Author(self.engine, tokenizers),
            self.indexer,
            arrivals,
            self.metrics,
        )
        self.jobs = Jobs(settings.data / "jobs", self.catalog, self.monitor, self.reader, self.sender)
        self._background = Background()
        self._unread: list[str] = []
        self.metrics.look_up(self._collect)

    async def start(self) -> None:
        """Bring the catalog to agree with the manifests and the spool, then take up what was left."""
        for name in ("jobs", "exports"):
            (self.settings.data / name).mkdir(exist_ok=True)
        self._unread = await run_in_threadpool(self.datasets.reconcile)
        await self.indexer.scan()
        interrupted = await run_in_threadpool(self.catalog.captures.interrupt)
        if interrupted:
            _log.warning("%d captures were under way when the service stopped", interrupted)
        self.monitor.refresh()
        self._background.start("monitor", self.monitor.run)
        self._background.start("indexer", self.indexer.run)
        self._background.start("packer", self.packer.run)
        await self.jobs.resume()

    async def stop(self) -> None:
        """Stop in order: nobody asks, nothing is sent, nothing is written; then give everything back."""
        await self.jobs.stop()
        await self.sender.stop()
        await self._background.stop()
        await self.engine.close()
        self.close()

    def close(self) -> None:
        """Give back what the constructor took."""
        self.datasets.close()
        self.catalog.close()
        self._lock.close()

    async def health(self) -> Health:
        """How everything is; each problem says what to do."""
        engine = await self.engine.health()
        self.monitor.refresh()
        problems = [
            self.monitor.problem() or "",
            engine.problem,
            self.indexer.problem,
            self.packer.problem,
            *self._unread,
            *(f"the {name} stumbled: {what}" for name, what in self._background.problems().items()),
        ]
        found = list(filter(None, problems))
        return Health(
            status="degraded" if found else "ok",
            problems=found,
            version=VERSION,
            spool=str(self.settings.dir),
            data=str(self.settings.data.absolute()),
            plugin=self.monitor.status,
            engine=engine,
        )

    def _collect(self) -> Iterator[Metric]:
        """The metrics that are looked up at each scrape."""
        totals = self.catalog.captures.totals()
        for name, what in (("captures", "Captures"), ("tokens", "Tokens of captures"), ("size", "Payload bytes")):
            metric = f"{PREFIX}{'bytes' if name == 'size' else name}"
            family = GaugeMetricFamily(metric, f"{what} by state", labels=["state"])
            for state, total in totals.items():
                family.add_metric([state], getattr(total, name))
            yield family
        jobs = GaugeMetricFamily(f"{PREFIX}jobs", "Jobs by state", labels=["state"])
        for job_state, count in self.catalog.jobs.counts().items():
            jobs.add_metric([job_state], count)
        yield jobs
        yield GaugeMetricFamily(f"{PREFIX}in_flight", "Captures under way", value=self.sender.in_flight)
        yield GaugeMetricFamily(
            f"{PREFIX}held_back", "Captures waiting for room in the spool", value=self.budget.waiting
        )
        yield from self._collect_plugin()

    def _collect_plugin(self) -> Iterator[Metric]:
        status = self.monitor.status
        up = self.monitor.problem() is None
        yield GaugeMetricFamily(f"{PREFIX}plugin_up", "Whether a server with the plugin captures", value=up)
        if status is None:
            return
        for name in ("quota", "used", "free"):
            value = getattr(status, f"{name}_bytes")
            yield GaugeMetricFamily(f"{PREFIX}spool_{name}_bytes", f"Bytes of the spool: {name}", value=value)
        ended = CounterMetricFamily(
            f"{PREFIX}plugin_captures", "What the plugin did since its server started", labels=["outcome"]
        )
        for outcome in ("marked", "published", "failed", "refused", "duplicates"):
            ended.add_metric([outcome], getattr(status.counts, outcome))
        yield ended


def _lock(data: Path) -> BinaryIO:
    """Hold the data directory for this process.

    Raises:
        UsageError: it cannot be made or written.
        CaptureError: another service holds it.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        file = (data / ".lock").open("a+b")
    except OSError as error:
        raise UsageError(
            f"the data directory {data} cannot be used: {error.strerror}; name another with --data or "
            "SGLANG_CAPTURE_DATA"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().decode(errors="replace").strip() or "unknown"
        file.close()
        raise CaptureError(
            f"another service (process {holder}) uses the data directory {data}: stop it, or name another directory "
            "with --data or SGLANG_CAPTURE_DATA"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file
