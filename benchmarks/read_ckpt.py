"""SpecForge: one ``.ckpt`` a sample, ``torch.load`` with a mapping, as its offline dataset reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import read_files, torch_save
from benchmarks.common import Rows


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    place = directory / "ckpt"
    place.mkdir()
    paths = sorted(torch_save.write(rows, place, number) for number in range(samples))
    files = read_files.Files(paths, partial(torch.load, weights_only=False, mmap=True))
    return read_files.ways("SpecForge's .ckpt, mapped", files, ("aux_hidden_state", "hidden_state"))
