"""Several ways of doing the same in turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Medians of one way: seconds passed, and seconds of all processors, those of ended children included."""

    wall: float
    cpu: float


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, *, clean: Callable[[], object] = lambda: None
) -> dict[str, Cost]:
    """Run every way ``rounds`` times, one after the other, after one round that is not counted.

    Args:
        clean: called after each run, not timed.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), _processor_seconds()
            way()
            cost = Cost(time.perf_counter() - wall, _processor_seconds() - cpu)
            clean()
            if number:
                costs[name].append(cost)
    return {
        name: Cost(statistics.median(cost.wall for cost in runs), statistics.median(cost.cpu for cost in runs))
        for name, runs in costs.items()
    }


def print_table(costs: Mapping[str, Cost], size: int, limit: str) -> None:
    """Markdown: each way's rate, and its ratio to the way ``limit``, by the clock and by processor time."""
    print("| way | GB/s | of a memory copy | of a memory copy, by processor time |\n|---|---|---|---|")
    for name, cost in costs.items():
        wall, cpu = costs[limit].wall / cost.wall, costs[limit].cpu / cost.cpu
        print(f"| {name} | {size / cost.wall / 1e9:.2f} | {wall:.2f} | {cpu:.2f} |")


def _processor_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
