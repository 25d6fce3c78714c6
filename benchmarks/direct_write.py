"""``O_DIRECT``: past the page cache, from two aligned buffers that take turns: one is filled, the other written."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

BUFFER = 4 << 20
BLOCK = 4096
"""What offsets, lengths and addresses are aligned to."""


def write(chunks: Iterable[memoryview], size: int, path: Path) -> str:
    """Write ``chunks``, ``size`` bytes in all, durably; the xxh3-64 of them."""
    digest = xxhash.xxh3_64()
    buffers = [mmap.mmap(-1, BUFFER) for _ in range(2)]
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, size)
    pending: Future[int] | None = None
    with ThreadPoolExecutor(1) as writer:
        for number, length in enumerate(_fill(chunks, buffers)):
            buffer = memoryview(buffers[number % 2])
            digest.update(buffer[:length])
            if pending is not None:
                pending.result()
            pending = writer.submit(os.pwrite, descriptor, buffer[: -(-length // BLOCK) * BLOCK], number * BUFFER)
    os.ftruncate(descriptor, size)
    os.fsync(descriptor)
    os.close(descriptor)
    return digest.hexdigest()


def _fill(chunks: Iterable[memoryview], buffers: list[mmap.mmap]) -> Iterable[int]:
    """Fill the buffers in turns; how much is in each."""
    places = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
    number = filled = 0
    for chunk in chunks:
        rows = torch.frombuffer(chunk, dtype=torch.uint8)
        while len(rows):
            part = rows[: BUFFER - filled]
            places[number % 2][filled : filled + len(part)].copy_(part)
            rows, filled = rows[len(part) :], filled + len(part)
            if filled == BUFFER:
                yield filled
                number, filled = number + 1, 0
    if filled:
        yield filled
