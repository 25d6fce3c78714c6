"""What formats with one file a sample share: a ``Dataset`` of paths, read with and without workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Files(Dataset[dict[str, torch.Tensor]]):
    """Each sample is what ``load`` makes of its file."""

    def __init__(self, paths: Sequence[Path], load: Callable[[Path], dict[str, Any]]) -> None:
        self._paths = paths
        self._load = load

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._load(self._paths[index])


def ways(name: str, files: Files, keys: Sequence[str]) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    """An epoch over the tensors ``keys``, shuffled."""
    return {name: partial(_epoch, files, keys, 0), f"{name}, 2 workers": partial(_epoch, files, keys, 2)}


def _epoch(files: Files, keys: Sequence[str], workers: int) -> Iterator[list[torch.Tensor]]:
    for sample in DataLoader(files, batch_size=None, shuffle=True, num_workers=workers):
        yield [sample[key] for key in keys]
