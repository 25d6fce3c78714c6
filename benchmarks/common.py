"""What all rivals share: the rows of one prompt, a place in shared memory, and a stopwatch."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

HIDDEN_SIZE = 7168
LAYERS = (3, 31, 59)
TOKENS = 1024


@dataclass(frozen=True)
class Rows:
    """What an engine holds after a prefill of ``T`` tokens: bfloat16 ``[T, H]`` for each layer and the last state."""

    input_ids: torch.Tensor
    layers: list[torch.Tensor]
    last: torch.Tensor

    @property
    def payload(self) -> int:
        """Bytes that have to be moved."""
        return self.last.nbytes * (len(self.layers) + 1)


class Writer(Protocol):
    """One rival: called with the rows, a directory and a number, it leaves one complete file."""

    def __call__(self, rows: Rows, directory: Path, number: int) -> Path: ...


def make_rows(tokens: int = TOKENS) -> Rows:
    generator = torch.Generator().manual_seed(0)

    def state() -> torch.Tensor:
        return torch.randn(tokens, HIDDEN_SIZE, generator=generator).to(torch.bfloat16)

    return Rows(torch.arange(tokens), [state() for _ in LAYERS], state())


@contextmanager
def shared_memory_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="sglang-capture-bench-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def seconds(action: Callable[[int], object], rounds: int) -> float:
    """The median of ``rounds`` runs, after one that is not counted."""
    action(0)
    times = []
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
