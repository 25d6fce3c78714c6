"""One epoch over the same samples, read as each format is read by its trainers: ``python -m benchmarks.read``.

Every sample is copied into one buffer, the same for all, so that each byte is touched and nothing but reading differs.
The files are in the page cache, or (``--cold``) dropped from it before each epoch.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from benchmarks import memory_copy, read_ckpt, read_litdata, read_ours, read_safetensors, read_webdataset
from benchmarks.common import Rows, make_rows
from benchmarks.turns import in_turns, print_table

WORK_SIZE = 700
Epoch = Iterable[list[torch.Tensor]]


class Reader(Protocol):
    """One rival: its files of the samples, and the ways of reading them, each to be called for every epoch.

    An epoch gives for each sample the tensors that are to be copied: ``hidden_states`` and the last hidden state.
    """

    def __call__(self, rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Epoch]]: ...


READERS: list[Reader] = [
    read_ours.ways,
    read_ckpt.ways,
    read_safetensors.ways,
    read_webdataset.ways,
    read_litdata.ways,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed epochs of each; the median counts")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="rows of a sample")
    parser.add_argument("--directory", type=Path, help="on the disk to read from; by default that of temporary files")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each epoch")
    parser.add_argument("--work", type=int, default=0, help="products of matrices after each sample, as if one trained")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(options.tokens)
    size = rows.payload * options.samples
    with tempfile.TemporaryDirectory(prefix="sglang-capture-bench-", dir=options.directory) as name:
        directory = Path(name)
        epochs: dict[str, Callable[[], Epoch]] = {"memory copy": memory_copy.epoch(rows, options.samples)}
        for reader in READERS:
            epochs.update(reader(rows, options.samples, directory))
        target = torch.zeros(rows.payload, dtype=torch.uint8)
        ways = {way: partial(_run, epoch, target, options.work) for way, epoch in epochs.items()}
        os.sync()  # what is still to be written can be dropped by nobody
        kept: Counter[str] = Counter()
        if options.cold:
            del ways[read_ours.LATER]  # what is mapped cannot be dropped
            _drop(directory, kept)
        clean = partial(_drop, directory, kept) if options.cold else lambda: None
        costs = in_turns(ways, options.rounds, clean=clean)
    if kept:
        drops = 1 + len(ways) * (options.rounds + 1)
        held = ", ".join(f"{name} {count} times" for name, count in kept.items())
        print(f"of {drops} times, files that would not leave the page cache: {held}\n")
    print(f"{options.samples} samples of {options.tokens} tokens, {size / 1e6:.0f} MB\n")
    print_table(costs, size, "memory copy")


def _run(epoch: Callable[[], Epoch], target: torch.Tensor, work: int) -> None:
    matrix = torch.ones(WORK_SIZE, WORK_SIZE)
    for sample in epoch():
        filled = 0
        for tensor in sample:
            size = tensor.nbytes
            target[filled : filled + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            filled += size
        if filled != len(target):
            raise RuntimeError(f"a sample of {filled} bytes, expected {len(target)}")
        for _ in range(work):
            matrix.mm(matrix)


def _drop(directory: Path, kept: Counter[str]) -> None:
    """Drop all files from the page cache; ``kept`` counts for each reader how often one would not go."""
    held: set[str] = set()
    gc.collect()  # mappings in a cycle of references
    for path in directory.rglob("*"):
        if path.is_file() and (size := path.stat().st_size):
            descriptor = os.open(path, os.O_RDONLY)
            for _ in range(2):  # some pages are in the hands of the kernel at first
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with suppress(BlockingIOError):  # the disk would have to be asked
                os.preadv(descriptor, [bytearray(1)], size // 2, os.RWF_NOWAIT)
                held.add(path.relative_to(directory).parts[0])
            os.close(descriptor)
    kept.update(held)


if __name__ == "__main__":
    main()
