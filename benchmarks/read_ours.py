"""sglang-capture: views of the mapped shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.common import Rows
from benchmarks.ours import SPEC
from sglang_capture import BlockShuffle, CaptureDataset
from sglang_capture.dump import Dump
from sglang_capture.shards import DatasetWriter, Sample

SHARDS = 2
LATER = "CaptureDataset, later epochs"
"""The shards stay mapped from the epoch before."""


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    path = directory / "ours"
    states = {"hidden_states": torch.stack(rows.layers, dim=1), "last_hidden": {"last_hidden_state": rows.last}}
    names = [f"sample-{number}" for number in range(samples)]
    with DatasetWriter(path, SPEC) as writer:
        for part in range(SHARDS):
            dumps = [Dump(name, "request", SPEC, rows.input_ids, **states) for name in names[part::SHARDS]]
            writer.write_shard([Sample(dump.capture_id, dump) for dump in dumps])
    kept = lru_cache(CaptureDataset)
    return {
        "CaptureDataset, first epoch": lambda: _tensors(CaptureDataset(path)),
        LATER: lambda: _tensors(kept(path)),
        "CaptureDataset, BlockShuffle": partial(_load, path),
        "CaptureDataset, BlockShuffle(prefetch=0)": partial(_load, path, prefetch=0),
        "CaptureDataset, BlockShuffle, 2 workers": partial(_load, path, prefetch=0, workers=2),
    }


def _load(path: Path, *, prefetch: int = 2, workers: int = 0) -> Iterator[list[torch.Tensor]]:
    dataset = CaptureDataset(path)
    sampler = BlockShuffle(dataset, prefetch=prefetch)
    return _tensors(DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers))


def _tensors(samples: CaptureDataset | DataLoader) -> Iterator[list[torch.Tensor]]:
    return ([sample["hidden_states"], sample["last_hidden_state"]] for sample in samples)
