"""SpecForge: one ``.ckpt`` a sample, ``torch.load`` with a mapping, as its offline dataset reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import torch_save
from benchmarks.common import Rows


class Files(Dataset[dict[str, torch.Tensor]]):
    """The files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(directory.glob("*.ckpt"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return torch.load(self._paths[index], weights_only=False, mmap=True)


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    place = directory / "ckpt"
    place.mkdir()
    for number in range(samples):
        torch_save.write(rows, place, number)
    return {
        "SpecForge's .ckpt, mapped": partial(_epoch, place, 0),
        "SpecForge's .ckpt, mapped, 2 workers": partial(_epoch, place, 2),
    }


def _epoch(place: Path, workers: int) -> Iterator[list[torch.Tensor]]:
    for sample in DataLoader(Files(place), batch_size=None, shuffle=True, num_workers=workers):
        yield [sample["aux_hidden_state"], sample["hidden_state"]]
