"""speculators: one safetensors file a sample, ``load_file``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset

from benchmarks import safetensors_file
from benchmarks.common import Rows


class Files(Dataset[dict[str, torch.Tensor]]):
    """The files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(directory.glob("*.safetensors"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return load_file(self._paths[index])


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    place = directory / "safetensors"
    place.mkdir()
    for number in range(samples):
        safetensors_file.write(rows, place, number)
    return {
        "safetensors, a file a sample": partial(_epoch, place, 0),
        "safetensors, a file a sample, 2 workers": partial(_epoch, place, 2),
    }


def _epoch(place: Path, workers: int) -> Iterator[list[torch.Tensor]]:
    for sample in DataLoader(Files(place), batch_size=None, shuffle=True, num_workers=workers):
        yield [sample["hidden_states"]]
