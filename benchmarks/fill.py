"""Filling dumps, by every rival on the same rows, in one process, in turns: ``python -m benchmarks.fill``.

Rates differ from machine to machine and from run to run; the ratios are what to look at.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import json_lists, memory_copy, ours, safetensors_file, torch_save
from benchmarks.common import Rows, Writer, make_rows, shared_memory_directory

COPY = "memory copy"
SAVE = "torch.save to /dev/shm"
WRITERS: dict[str, Writer] = {SAVE: torch_save.write, "safetensors save_file to /dev/shm": safetensors_file.write}
JSON = "tolist + JSON to /dev/shm"
JSON_TOKENS = 8
"""JSON is measured on fewer rows, and counted by the byte like the rest."""


@dataclass
class Way:
    """One rival: what it does for a batch of prompts, and how many bytes of rows that moves."""

    action: Callable[[int], object]
    payload: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)

    def turn(self, number: int) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.action(number)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        self.engine.append(getattr(self.action, "engine_seconds", self.wall[-1]))

    def nanoseconds(self, which: str) -> float:
        """The median of all turns but the first, for a byte of rows."""
        return statistics.median(getattr(self, which)[1:]) / self.payload * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each; the median counts")
    parser.add_argument("--tokens", type=int, default=512, help="rows of a prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, few = make_rows(options.tokens), make_rows(JSON_TOKENS)
    with shared_memory_directory() as directory, contextlib.ExitStack() as stack:
        ways = _ways(rows, few, directory, stack)
        for number in range(options.rounds + 1):
            for way in ways.values():
                way.turn(number)
    print(f"{ours.BATCH} prompts of {options.tokens} tokens, {len(rows.layers)} layers and the last hidden state, ")
    print(f"{rows.payload * ours.BATCH / 1e6:.0f} MB; all ratios are of the memory copy in the same run\n")
    _print(ways)


def _ways(rows: Rows, few: Rows, directory: Path, stack: contextlib.ExitStack) -> dict[str, Way]:
    whole = rows.payload * ours.BATCH
    ways = {COPY: Way(memory_copy.batch_copier(rows, ours.BATCH), whole)}
    for name, reuse in (("sglang-capture, pages used again", True), ("sglang-capture, fresh pages", False)):
        ways[name] = Way(stack.enter_context(ours.captures(directory, rows, reuse=reuse)), whole)
    for name, write in WRITERS.items():
        ways[name] = Way(_each(write, rows, directory), whole)
    ways[JSON] = Way(_each(json_lists.write, few, directory), few.payload * ours.BATCH)
    return ways


def _each(write: Writer, rows: Rows, directory: Path) -> Callable[[int], None]:
    """Write a file for each prompt and remove it, so that each turn begins with fresh pages."""

    def run(number: int) -> None:
        for index in range(ours.BATCH):
            write(rows, directory, number * ours.BATCH + index).unlink()

    return run


def _print(ways: dict[str, Way]) -> None:
    copy, save = ways[COPY], ways[SAVE]
    print("| way | GB/s | rate / memory copy | rate / torch.save | CPU / memory copy | engine's thread / memory copy |")
    print("|---|---|---|---|---|---|")
    for name, way in ways.items():
        wall, cpu = way.nanoseconds("wall"), way.nanoseconds("cpu")
        of_copy, of_save = copy.nanoseconds("wall") / wall, save.nanoseconds("wall") / wall
        used, held = cpu / copy.nanoseconds("cpu"), way.nanoseconds("engine") / copy.nanoseconds("engine")
        print(f"| {name} | {1 / wall:.2f} | {of_copy:.2f} | {of_save:.2f} | {used:.2f} | {held:.2f} |")
    spared = [ways[JSON].nanoseconds("cpu") / ways[name].nanoseconds("cpu") for name in list(ways)[1:3]]
    print(f"\nCPU time of JSON / ours: {spared[0]:.0f} with pages used again, {spared[1]:.0f} with fresh ones")


if __name__ == "__main__":
    main()
