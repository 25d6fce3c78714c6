"""speculators: one safetensors file a sample, ``load_file``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import read_files, safetensors_file
from benchmarks.common import Rows


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    place = directory / "safetensors"
    place.mkdir()
    paths = sorted(safetensors_file.write(rows, place, number) for number in range(samples))
    return read_files.ways("safetensors, a file a sample", read_files.Files(paths, load_file), ("hidden_states",))
