"""The catalog of a service at a thousand and at a million captures, side by side: ``python -m benchmarks.catalog``.

Every measurement has a process of its own, so that one's memory is not another's. Times are medians; where two sizes
are compared over HTTP, they are asked in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import mmap
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.catalog_fill import DATASET, DUMP_SPEC, TOKENS, capture_id, fill, fill_spool
from benchmarks.common import shared_memory_directory
from benchmarks.ours import SPEC
from sglang_capture.catalog import DumpFacts, origin
from sglang_capture.service.app import create_app
from sglang_capture.service.core import Service
from sglang_capture.service.models import JobOptions
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.shards import CaptureDataset, DatasetWriter
from sglang_capture.shards.manifest import MANIFEST_NAME, read_manifest, write_manifest

_SPOOLED = 4096
"""As many as wait at most before a shard is packed."""
_SCANS = 5

Times = dict[str, list[float]]
"""For each question the milliseconds at each size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000, 1_000_000], help="captures in the catalogs")
    parser.add_argument("--rounds", type=int, default=100, help="timed runs of each question; the median counts")
    parser.add_argument("--requests", type=int, default=10_000, help="after so many the memory is looked at again")
    parser.add_argument("--dumps", type=int, default=100_000, help="in the spool when a service starts")
    parser.add_argument("--directory", type=Path, help="where catalogs are made, on a disk; unset: the usual for files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, shared_memory_directory() as spool:
        places = [_filled(Path(directory), size) for size in options.sizes]
        _print_times(options.sizes, _alone(_time_questions, places, options.rounds))
        for size, place in zip(options.sizes, places, strict=True):
            before, after = _alone(_memory_of_requests, place, size, options.requests)
            print(f"memory at {size:,} captures: {before:.0f} MB, after {options.requests:,} requests {after:.0f} MB")
        print()
        _print_facts("the dataset's manifest", _alone(_time_dataset, places[-1] / DATASET))
        facts = _alone(_time_start, places[-1], spool, options.dumps)
        _print_facts(f"a start with {options.dumps:,} dumps in the spool", facts)


def _filled(directory: Path, size: int) -> Path:
    place = directory / str(size)
    place.mkdir()
    start = time.perf_counter()
    fill(place, size, _SPOOLED)
    print(f"{size:,} captures filled in {time.perf_counter() - start:.1f} s")
    return place


def _alone(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What ``measure`` gives in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def _service(data: Path, spool: Path) -> Service:
    return Service(ServiceSettings(data=data, dir=spool, server="http://127.0.0.1:9", pack_age=1e9))


def _client(service: Service) -> httpx.AsyncClient:
    """A client of the whole application, without sockets; the service is not started."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://127.0.0.1")


async def _get(client: httpx.AsyncClient, path: str) -> None:
    _check(await client.get(path))


def _check(answer: httpx.Response) -> None:
    if not answer.is_success:
        raise RuntimeError(f"{answer.url} was answered with {answer.status_code}: {answer.text}")


def _paths(size: int) -> dict[str, str]:
    """What is asked over HTTP; pages are of the same length at every size."""
    return {
        "`GET /capture`": "/capture",
        "… from the middle on": f"/capture?cursor={size // 2}",
        "… `state=packed`": "/capture?state=packed",
        "… `state=packed`, from the middle on": f"/capture?state=packed&cursor={size // 2}",
        "… `state=spooled`": "/capture?state=spooled",
        "… `state=pending`, 64 of them": "/capture?state=pending",
        "… `state=failed`, 8 of them": "/capture?state=failed&limit=8",
        "`GET /capture/{id}`": f"/capture/{capture_id(size // 2)}",
        "`GET /capture/shards?dataset=`, 10 of them": f"/capture/shards?dataset={DATASET}&limit=10",
        "`GET /metrics`": "/metrics",
        "`GET /health`": "/health",
    }


def _time_questions(places: list[Path], rounds: int) -> Times:
    return asyncio.run(_ask_in_turns([_service(place, place / "no-spool") for place in places], rounds))


async def _ask_in_turns(services: list[Service], rounds: int) -> Times:
    clients = [_client(service) for service in services]
    paths = [_paths(int(service.settings.data.name)) for service in services]
    times: Times = {}
    for name in paths[0]:
        taken: list[list[float]] = [[] for _ in services]
        for _ in range(rounds + 1):
            for client, path, took in zip(clients, paths, taken, strict=True):
                start = time.perf_counter()
                await _get(client, path[name])
                took.append(time.perf_counter() - start)
        times[name] = [statistics.median(took[1:]) * 1e3 for took in taken]
    times["`POST /capture` of one that is there (a resumed `run`)"] = await _ask_again(services, clients, rounds)
    for name in _inner(services[0]):
        times[name] = [_milliseconds(_inner(service)[name], rounds) for service in services]
    for service in services:
        service.close()
    return times


async def _ask_again(services: list[Service], clients: list[httpx.AsyncClient], rounds: int) -> list[float]:
    """What it takes to be told that a capture of these very ids and this mask is there."""
    body = {"capture_id": "again", "input_ids": list(range(TOKENS)), "loss_mask": [1] * TOKENS}
    ask = services[0].reader.read(body, JobOptions())
    taken: list[list[float]] = [[] for _ in services]
    for service in services:
        captures = service.catalog.captures
        asked = {"request_digest": ask.digest, "sent": ask.sent, "loss_mask": ask.loss_mask}
        captures.begin(ask.capture_id, spec=SPEC, metadata={}, **asked)
        captures.record_dumps([DumpFacts(ask.capture_id, TOKENS, SPEC, ask.sent)])
    for _ in range(rounds + 1):
        for client, took in zip(clients, taken, strict=True):
            start = time.perf_counter()
            _check(await client.post("/capture", json=body))
            took.append(time.perf_counter() - start)
    return [statistics.median(took[1:]) * 1e3 for took in taken]


def _inner(service: Service) -> dict[str, Callable[[int], object]]:
    """What the service asks its catalog by itself, and what it tells it."""
    captures = service.catalog.captures
    sent = origin.of_ids([1])

    def begin(number: int) -> None:
        captures.begin(
            f"new-{number}", request_digest="d", sent=sent, spec=SPEC, loss_mask=None, metadata={"number": number}
        )

    return {
        "what waits to be packed (4 times a second)": lambda _: captures.spooled_groups(),
        "the captures of the next shard (of as many as wait)": lambda _: captures.spooled(
            SPEC.digest, limit=_SPOOLED, most_bytes=1 << 30
        ),
        "a capture is begun": begin,
        "its dump is recorded": lambda number: captures.record_dumps([DumpFacts(f"new-{number}", 8, SPEC, sent)]),
    }


def _milliseconds(action: Callable[[int], object], rounds: int) -> float:
    times = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def _memory_of_requests(place: Path, size: int, requests: int) -> tuple[float, float]:
    """The process's memory before and after so many requests, all kinds in turns, in MB."""
    return asyncio.run(_request_all(_service(place, place / "no-spool"), size, requests))


async def _request_all(service: Service, size: int, requests: int) -> tuple[float, float]:
    async with _client(service) as client:
        paths = [path for path in _paths(size).values() if path != "/health"]  # that one looks for a server
        for path in paths * 10:
            await _get(client, path)
        before = _memory()
        for number in range(requests):
            await _get(client, paths[number % len(paths)])
        after = _memory()
    service.close()
    return before, after


def _time_dataset(dataset: Path) -> dict[str, str]:
    """What it costs that a manifest names every shard."""
    manifest = read_manifest(dataset)
    size = (dataset / MANIFEST_NAME).stat().st_size
    read = _milliseconds(lambda _: read_manifest(dataset), 3)
    write = _milliseconds(lambda _: write_manifest(dataset, manifest), 3)
    facts = {
        "shards and samples": f"{len(manifest.shards):,} and {manifest.samples:,}, {size / 1e6:.1f} MB",
        "read, and written (once for each shard)": f"{read:.0f} ms, and {write:.0f} ms",
    }
    for name, opened in (
        ("`DatasetWriter` opened (reads each shard's header)", lambda: DatasetWriter(dataset, SPEC)),
        ("`CaptureDataset` opened (looks at each file)", lambda: CaptureDataset(dataset)),
    ):
        before, start = _memory(), time.perf_counter()
        kept = opened()
        facts[name] = f"{(time.perf_counter() - start) * 1e3:.0f} ms, {_memory() - before:.0f} MB"
        del kept
    return facts


def _time_start(data: Path, spool: Path, dumps: int) -> dict[str, str]:
    logging.disable(logging.WARNING)  # of captures whose dumps are gone
    return asyncio.run(_start(_service(data, spool), dumps))


async def _start(service: Service, dumps: int) -> dict[str, str]:
    """The steps of a start, without the tasks that would then run beside what is measured."""
    await service.indexer.scan()  # what the catalog holds spooled has no dumps
    fill_spool(service.settings.dir, dumps)
    start = time.perf_counter()
    service.datasets.reconcile()
    facts = {"manifests compared with the catalog": f"{time.perf_counter() - start:.1f} s"}
    before, start = _memory(), time.perf_counter()
    await service.indexer.scan()
    facts["first scan"] = f"{time.perf_counter() - start:.1f} s"
    facts["memory before and after it"] = f"{before:.0f} MB, {_memory():.0f} MB"
    scans = []
    for _ in range(_SCANS):
        start = time.perf_counter()
        await service.indexer.scan()
        scans.append(time.perf_counter() - start)
    facts["each further scan (every 5 s)"] = f"{statistics.median(scans) * 1e3:.0f} ms"
    captures = service.catalog.captures
    groups = _milliseconds(lambda _: captures.spooled_groups(), _SCANS)
    facts["what waits to be packed (4 times a second)"] = f"{groups:.1f} ms"
    taken = _milliseconds(lambda _: captures.spooled(DUMP_SPEC.digest, limit=_SPOOLED, most_bytes=1 << 30), _SCANS)
    facts["the captures of the next shard (4,096)"] = f"{taken:.0f} ms"
    service.close()
    return facts


def _memory() -> float:
    """Of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6


def _print_times(sizes: list[int], times: Times) -> None:
    print(f"\n| in ms | {sizes[0]:,} captures | {sizes[1]:,} captures | difference |")
    print("|---|---|---|---|")
    for name, (few, many) in times.items():
        print(f"| {name} | {few:.2f} | {many:.2f} | {many - few:+.2f} |")
    print()


def _print_facts(title: str, facts: dict[str, str]) -> None:
    print(f"| {title} | |\n|---|---|")
    for name, value in facts.items():
        print(f"| {name} | {value} |")
    print(flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
