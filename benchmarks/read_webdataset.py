"""webdataset: samples as ``torch.save`` in tar files, read from front to back, shuffled in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import webdataset
from torch.utils.data import DataLoader

from benchmarks.common import Rows

SHARDS = 2
BUFFER = 8
"""Samples that wait in memory to be mixed."""


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    place = directory / "webdataset"
    place.mkdir()
    states = {"hidden_states": torch.stack(rows.layers, dim=1), "last_hidden_state": rows.last}
    for part in range(SHARDS):
        with webdataset.TarWriter(str(place / f"shard-{part:06d}.tar")) as tar:
            for number in range(part, samples, SHARDS):
                tar.write({"__key__": f"{number:08d}", "pth": states})
    return {
        "webdataset": partial(_epoch, place, 0),
        "webdataset, 2 workers": partial(_epoch, place, 2),
    }


def _epoch(place: Path, workers: int) -> Iterator[list[torch.Tensor]]:
    files = [str(path) for path in sorted(place.glob("*.tar"))]
    dataset = webdataset.WebDataset(files, shardshuffle=SHARDS).shuffle(BUFFER).decode()
    for sample in DataLoader(dataset, batch_size=None, num_workers=workers):
        yield [sample["pth"]["hidden_states"], sample["pth"]["last_hidden_state"]]
