"""Prometheus metrics: what the service counts, and what it looks up when it is asked.

Each service has a registry of its own, so that several may live in one process. docs/http-api.md lists every metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

PREFIX = "sglang_capture_"

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody asked for


class Metrics:
    """What is counted as it happens; :meth:`look_up` adds what is read from the catalog and the spool."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.indexed = Counter(
            f"{PREFIX}indexed", "Files seen in the spool, by what they were", ["outcome"], registry=self.registry
        )
        self.sent = Counter(
            f"{PREFIX}sent", "Captures sent to SGLang, by how they ended", ["outcome"], registry=self.registry
        )
        self.pack_seconds = Histogram(
            f"{PREFIX}pack_seconds",
            "Time to write one shard, record it and free its dumps",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=self.registry,
        )
        self.packed_bytes = Counter(f"{PREFIX}packed_bytes", "Bytes of the shards written", registry=self.registry)
        self.packed_samples = Counter(f"{PREFIX}packed_samples", "Captures packed", registry=self.registry)
        self.pack_failures = Counter(
            f"{PREFIX}pack_failures", "Shards that could not be written", registry=self.registry
        )

    def look_up(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Have ``collect`` called at each scrape."""
        self.registry.register(_LookedUp(collect))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _LookedUp:
    """A collector that does not run when it is registered: the service may not have started yet."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]):
        self.collect = collect

    def describe(self) -> Iterable[Metric]:
        return []
