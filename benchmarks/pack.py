"""From dumps in shared memory to one shard with its checksum: ``python -m benchmarks.pack``.

Beside it: the same bytes written plainly, to tell apart what the disk costs, and the parts that a shard is made of.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import xxhash

from benchmarks import direct_write, ours
from benchmarks.common import Rows, make_rows, shared_memory_directory
from benchmarks.turns import in_turns, print_table
from sglang_capture.dump import DumpFile, load_dump
from sglang_capture.shards import DatasetWriter, Sample

CHUNK = 256 << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each; the median counts")
    parser.add_argument("--dumps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="rows of a dump")
    parser.add_argument("--directory", type=Path, help="on the disk to write to; by default that of temporary files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(options.tokens)
    size = rows.payload * options.dumps
    with shared_memory_directory() as memory, _directory(options.directory) as disk:
        dumps = [_dump(rows, memory, f"capture-{number}") for number in range(options.dumps)]
        places = {"disk": disk / "out", "/dev/shm": memory / "out"}

        def clean() -> None:
            for place in places.values():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()

        clean()
        costs = in_turns(_ways(dumps, size, places), options.rounds, clean=clean)
    print(f"{options.dumps} dumps of {options.tokens} tokens, {size / 1e6:.0f} MB\n")
    print_table(costs, size, "memory copy")


def _dump(rows: Rows, directory: Path, capture_id: str) -> Path:
    dump = DumpFile(directory / f".part-{capture_id}", capture_id, "request", ours.SPEC, rows.input_ids)
    torch.stack(rows.layers, dim=1, out=dump.hidden_states)
    dump.last_hidden["last_hidden_state"].copy_(rows.last)
    final = directory / f"{capture_id}.pt"
    dump.publish(final)
    return final


def _ways(dumps: list[Path], size: int, places: dict[str, Path]) -> dict[str, Callable[[], object]]:
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    disk = places["disk"]
    ways: dict[str, Callable[[], object]] = {"memory copy": partial(target.copy_, source)}
    for name, place in places.items():
        ways[f"dumps to a shard on {name}"] = partial(_pack, dumps, place)
        ways[f"the bytes to {name}, `os.write`"] = partial(_plain, dumps, place)
    ways["the bytes to disk, `os.write`, no fsync"] = partial(_plain, dumps, disk, sync=False)
    ways["the bytes to disk, xxh3, O_DIRECT"] = lambda: direct_write.write(mapped(dumps), size, disk / "direct")
    ways["part: the dumps mapped and hashed"] = partial(_hash, dumps)
    ways["part: xxh3 of pages that are there"] = lambda: xxhash.xxh3_64_hexdigest(source.numpy().data)
    return ways


def mapped(dumps: list[Path]) -> Iterator[memoryview]:
    """The rows of dumps, in the order of a shard."""
    loaded = [load_dump(path) for path in dumps]
    tensors = [dump.hidden_states for dump in loaded] + [dump.last_hidden["last_hidden_state"] for dump in loaded]
    for tensor in tensors:
        rows = tensor.view(torch.uint8).numpy().data.cast("B")
        yield from (rows[begin : begin + CHUNK] for begin in range(0, len(rows), CHUNK))


def _pack(dumps: list[Path], place: Path) -> None:
    with DatasetWriter(place, ours.SPEC) as writer:
        writer.write_shard([Sample(path.stem, load_dump(path)) for path in dumps])


def _plain(dumps: list[Path], place: Path, *, sync: bool = True) -> None:
    descriptor = os.open(place / "plain", os.O_CREAT | os.O_WRONLY)
    for chunk in mapped(dumps):
        os.write(descriptor, chunk)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def _hash(dumps: list[Path]) -> None:
    digest = xxhash.xxh3_64()
    for chunk in mapped(dumps):
        digest.update(chunk)


@contextmanager
def _directory(where: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sglang-capture-bench-", dir=where) as directory:
        yield Path(directory)


if __name__ == "__main__":
    main()
