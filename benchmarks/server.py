"""What capturing costs a server: ``python -m benchmarks.server``. Four servers with the same small model of real width.

Each answers the same prompts, in turns: one without the plugin, one with it and nothing marked, one with every prompt
marked, and one that returns hidden states in SGLang's own way, as JSON. What counts is the processor time of all
processes of a server, and the time until the prompts are answered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import make_rows
from benchmarks.memory_copy import batch_copier
from sglang_capture import spool
from sglang_capture.commands._processes import Background, free_port
from sglang_capture.slabs import hand_back
from sglang_capture.spool import read_status
from sglang_capture.tiny_model import make_tiny_model

LAYERS = (2, 4, 5)
PROMPTS, TOKENS, AT_ONCE = 8, 512, 4
JSON_PROMPTS = 1
_TICKS = os.sysconf("SC_CLK_TCK")
_OWN_WAY = (
    *("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
    *("--return-aux-hidden-state-layer-ids", *(str(index) for index in LAYERS)),
    "--enable-return-hidden-states",
)


@dataclass
class Server:
    """One of the four, and what was measured of it: seconds of the clock, and of all its processors, in each turn."""

    url: str
    process: Background
    spool: Path
    prompts: int = PROMPTS
    body: Callable[[str], dict[str, Any]] = lambda _: {}
    captures: bool = False
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def turn(self, number: int, client: httpx.Client) -> None:
        names = [f"prompt-{number}-{index}" for index in range(self.prompts)]
        cpu, start = self.processor_seconds(), time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: self._ask(client, name), names))
        self.wall.append(time.perf_counter() - start)
        if self.captures:
            _until(lambda: all(spool.dump_path(self.spool, name).exists() for name in names))
        self.cpu.append(self.processor_seconds() - cpu)
        for name in names if self.captures else ():
            hand_back(self.spool, name)

    def _ask(self, client: httpx.Client, name: str) -> None:
        # Another first token each time: no prompt is found in the cache of prefixes.
        ids = [20 + hash(name) % 400, *(20 + (index * 7) % 400 for index in range(TOKENS - 1))]
        request = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        extra = self.body(name)
        request["sampling_params"].update(extra.pop("sampling_params", {}))
        client.post(f"{self.url}/generate", json={**request, **extra}).raise_for_status()

    def processor_seconds(self) -> float:
        """Of the whole group of processes, those that have ended included."""
        stats = Path("/proc").glob("[0-9]*/stat")
        return sum(_seconds_of(path) for path in stats if _group_of(path) == self.process.pid)

    def per_token(self, values: list[float]) -> float:
        """The median turn's, but for the first, for a token."""
        return statistics.median(values[1:]) / (self.prompts * TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each server; the median counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-capture-bench-") as directory, contextlib.ExitStack() as stack:
        model = Path(directory) / "model"
        make_tiny_model(model, layers=6, hidden=7168, dtype="bfloat16")
        servers = _servers(model, stack)
        client = stack.enter_context(httpx.Client(timeout=600))
        for number in range(options.rounds + 1):
            for server in servers.values():
                server.turn(number, client)
        copy = _copy_seconds()
        _print(servers, copy)


def _servers(model: Path, stack: contextlib.ExitStack) -> dict[str, Server]:
    plugin = {"SGLANG_PLUGINS": "sglang_capture", "SGLANG_CAPTURE_LAYERS": ",".join(map(str, LAYERS))}
    servers = {
        "no plugin": stack.enter_context(_server(model, {})),
        "plugin, nothing marked": stack.enter_context(_server(model, plugin)),
        "plugin, every prompt marked": stack.enter_context(_server(model, plugin)),
        "SGLang's own, as JSON": stack.enter_context(_server(model, {}, *_OWN_WAY)),
    }
    marked, own = servers["plugin, every prompt marked"], servers["SGLang's own, as JSON"]
    marked.captures = True
    marked.body = lambda name: {"sampling_params": {"custom_params": {"capture": name}}}
    own.body = lambda _: {"return_hidden_states": True}
    own.prompts = JSON_PROMPTS
    return servers


@contextlib.contextmanager
def _server(model: Path, env: dict[str, str], *extra: str) -> Iterator[Server]:
    place = Path(tempfile.mkdtemp(prefix="sglang-capture-bench-", dir="/dev/shm"))
    port = free_port()
    command = [sys.executable, "-m", "sglang_capture_patches.cpu", "--model-path", str(model), "--port", str(port)]
    flags = ("--dtype", "bfloat16", "--sleep-on-idle", "--disable-radix-cache", "--max-total-tokens", "16384", *extra)
    log = place / "server.log"
    try:
        with Background(
            "SGLang", [*command, *flags], log, {**env, "SGLANG_CAPTURE_DIR": str(place / "spool")}
        ) as process:
            url = f"http://127.0.0.1:{port}"
            _until(lambda: _answers(url, process))
            yield Server(url, process, place / "spool")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _answers(url: str, process: Background) -> bool:
    process.check()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health_generate", timeout=60).status_code == 200
    return False


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def _group_of(path: Path) -> int | None:
    with contextlib.suppress(OSError, IndexError):
        return int(path.read_text().rpartition(")")[2].split()[2])
    return None


def _seconds_of(path: Path) -> float:
    with contextlib.suppress(OSError):
        return sum(map(int, path.read_text().rpartition(")")[2].split()[11:15])) / _TICKS
    return 0.0


def _copy_seconds() -> float:
    """Processor seconds that a memory copy of a token's rows takes."""
    copy, times = batch_copier(make_rows(TOKENS), PROMPTS), []
    for number in range(8):
        start = time.process_time()
        copy(number)
        times.append(time.process_time() - start)
    return statistics.median(times[1:]) / (PROMPTS * TOKENS)


def _print(servers: dict[str, Server], copy: float) -> None:
    base = servers["no plugin"]
    wall, cpu = base.per_token(base.wall), base.per_token(base.cpu)
    print(f"prompts of {TOKENS} tokens, {len(LAYERS)} layers of hidden size 7168 and the last hidden state")
    print(f"a memory copy of a token's rows: {copy * 1e6:.1f} us of a processor\n")
    print("| server | throughput / no plugin | CPU time a token, us | added, us | added / memory copy |")
    print("|---|---|---|---|---|")
    for name, server in servers.items():
        added = server.per_token(server.cpu) - cpu
        print(
            f"| {name} | {wall / server.per_token(server.wall):.3f} | {server.per_token(server.cpu) * 1e6:.0f} "
            f"| {added * 1e6:.1f} | {added / copy:.1f} |"
        )
    marked = servers["plugin, every prompt marked"]
    ratio = (servers["SGLang's own, as JSON"].per_token(servers["SGLang's own, as JSON"].cpu) - cpu) / (
        marked.per_token(marked.cpu) - cpu
    )
    print(f"\nadded by SGLang's own JSON / added by ours: {ratio:.0f}")
    for name in ("plugin, nothing marked", "plugin, every prompt marked"):
        status = read_status(servers[name].spool)
        if status is not None:
            counts = status.counts
            print(f"{name}: {json.dumps({k: getattr(counts, k) for k in ('copies', 'published', 'reused', 'failed')})}")


if __name__ == "__main__":
    main()
