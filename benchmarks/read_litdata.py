"""litdata: chunks of serialised samples, ``StreamingDataset``. Left out where the library is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows

CHUNK_BYTES = 256 << 20


def ways(rows: Rows, samples: int, directory: Path) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    if importlib.util.find_spec("litdata") is None:
        print("litdata is not installed: not measured\n")
        return {}
    from litdata.streaming.cache import Cache

    place = directory / "litdata"
    place.mkdir()
    cache = Cache(str(place), chunk_bytes=CHUNK_BYTES)
    states = {"hidden_states": torch.stack(rows.layers, dim=1), "last_hidden_state": rows.last}
    states = {name: state.view(torch.int16) for name, state in states.items()}  # it takes no bfloat16
    for number in range(samples):
        cache[number] = states
    cache.done()
    cache.merge()
    return {"litdata": partial(_epoch, place, 0), "litdata, 2 workers": partial(_epoch, place, 2)}


def _epoch(place: Path, workers: int) -> Iterator[list[torch.Tensor]]:
    from litdata import StreamingDataLoader, StreamingDataset

    samples: Any = StreamingDataset(str(place), shuffle=True)
    if workers:
        samples = StreamingDataLoader(samples, batch_size=1, collate_fn=_only, num_workers=workers)
    for sample in samples:
        yield [sample["hidden_states"], sample["last_hidden_state"]]


def _only(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return samples[0]
