"""Every rival on the same rows, in one process, one after the other in turns: ``python -m benchmarks.run_all``.

Rates differ from machine to machine and from run to run; the ratios are what to look at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import json_lists, memory_copy, ours, safetensors_file, torch_save
from benchmarks.common import Rows, Writer, make_rows, seconds, shared_memory_directory

WRITERS: dict[str, Writer] = {
    "sglang-capture, fresh files": ours.write,
    "torch.save to /dev/shm": torch_save.write,
    "safetensors save_file to /dev/shm": safetensors_file.write,
}
JSON = "tolist + JSON to /dev/shm"
JSON_TOKENS = 64
"""JSON is measured on fewer rows, and counted by the byte like the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each; the median counts")
    parser.add_argument("--tokens", type=int, default=1024, help="rows of a prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, few = make_rows(options.tokens), make_rows(JSON_TOKENS)
    with shared_memory_directory() as directory:
        rates = {"memory copy": rows.payload / seconds(memory_copy.copier(rows), options.rounds)}
        for name, write in WRITERS.items():
            rates[name] = rows.payload / seconds(_once(write, rows, directory), options.rounds)
        rates[JSON] = few.payload / seconds(_once(json_lists.write, few, directory), options.rounds)
    print(
        f"{options.tokens} tokens, {len(rows.layers)} layers and the last hidden state, {rows.payload / 1e6:.0f} MB\n"
    )
    print("| way | GB/s | of a memory copy | of torch.save |")
    print("|---|---|---|---|")
    for name, rate in rates.items():
        of_copy, of_save = rate / rates["memory copy"], rate / rates["torch.save to /dev/shm"]
        print(f"| {name} | {rate / 1e9:.2f} | {of_copy:.3f} | {of_save:.2f} |")


def _once(write: Writer, rows: Rows, directory: Path) -> Callable[[int], None]:
    """Write one file and remove it, so that each round begins with fresh pages."""

    def run(number: int) -> None:
        write(rows, directory, number).unlink()

    return run


if __name__ == "__main__":
    main()
