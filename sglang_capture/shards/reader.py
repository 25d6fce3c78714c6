"""Samples out of a dataset: views of the mapped shards, no copies.

A shard is mapped once per process, privately: what is written into a sample's tensors stays in this process, and the
file is never changed. Each tensor has a storage of exactly its own rows, so that handing a sample from a ``DataLoader``
worker to its parent, or saving it, moves that sample and not the shard around it.
"""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from sglang_capture.shards.layout import LOST, Layout, read_layout
from sglang_capture.shards.manifest import DatasetError, Manifest, ShardEntry, read_manifest
from sglang_capture.spec import CaptureSpec

_MAPPED_SHARDS: Final = 128
"""Shards mapped at once; each takes a file descriptor, and page tables for what was read of it."""

_SAMPLE_KEYS: Final = ("input_ids", "loss_mask", "hidden_states")


class Shard:
    """One shard: its header and offsets are read when first needed, its rows when they are looked at.

    Raises:
        DatasetError: its file is missing, or its size is not what the manifest says.
    """

    def __init__(self, dataset: Path, entry: ShardEntry) -> None:
        self.path = dataset / entry.file
        self.entry = entry
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise DatasetError(f"{self.path}, named by the manifest, is missing: {LOST}") from None
        if size != entry.bytes:
            raise DatasetError(
                f"{self.path} is truncated or was changed (expected {entry.bytes:,} bytes, found {size:,}): {LOST}"
            )

    @cached_property
    def layout(self) -> Layout:
        return read_layout(self.path)

    @cached_property
    def ids(self) -> list[str]:
        ids: list[str] = json.loads(self.layout.metadata["sample_ids"])
        return ids

    @cached_property
    def metadata(self) -> list[dict[str, Any]]:
        text = self.layout.metadata.get("sample_metadata")
        metadata: list[dict[str, Any]] = json.loads(text) if text else [{} for _ in self.ids]
        return metadata

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 ``[samples + 1]``."""
        place = self.layout.tensors["offsets"]
        with self.path.open("rb") as file:
            file.seek(place.begin)
            return torch.frombuffer(bytearray(file.read(place.end - place.begin)), dtype=place.dtype)

    def open(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def rows(self, pages: mmap.mmap, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows ``begin:end`` of a tensor, as a view of ``pages``."""
        place = self.layout.tensors[name]
        flat = torch.frombuffer(
            pages,
            dtype=place.dtype,
            count=(end - begin) * place.row_items,
            offset=place.begin + begin * place.row_bytes,
        )
        return flat.view(end - begin, *place.row_shape)


class CaptureDataset(Dataset[dict[str, Any]]):
    """A dataset of captures as a torch ``Dataset``; each sample keeps its own length.

    ``dataset[i]`` is a dictionary, for a sample of T tokens:

    ==========================  =============================================================
    ``sample_id``               str
    ``input_ids``               int64 ``[T]``
    ``loss_mask``               uint8 ``[T]``, 1 = supervised
    ``hidden_states``           ``spec.dtype`` ``[T, L, H]``, in the order of ``spec.layers``
    ``last_hidden_state``       ``[T, H]`` after the final norm, if ``spec.last_hidden`` has it
    ``last_hidden_state_prenorm``  ``[T, H]`` before it, if ``spec.last_hidden`` has it
    ==========================  =============================================================

    Every rank sees its own samples: the ones whose position, counted over all shards, is ``rank`` modulo
    ``world_size``. Together the ranks see each sample once. Where a sampler already divides the samples over the ranks
    (``DistributedSampler``, accelerate, the Hugging Face Trainer), pass ``rank=0, world_size=1``: else they are divided
    twice.

    Args:
        path: the directory that holds ``manifest.json``.
        rank, world_size: as in ``torch.distributed`` if that is initialised, else 0 and 1.

    Raises:
        DatasetError: there is no dataset at ``path``, a newer release wrote it, or a shard is missing or truncated.
        ValueError: ``rank`` is not below ``world_size``.
    """

    def __init__(self, path: str | Path, *, rank: int | None = None, world_size: int | None = None) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        self._rank, self._world_size = _place_in_world(rank, world_size)
        self._shards = [Shard(self.path, entry) for entry in self.manifest.shards]
        self._starts = [0, *itertools.accumulate(entry.samples for entry in self.manifest.shards)]
        self._pages = self._page_cache()

    @property
    def spec(self) -> CaptureSpec:
        return self.manifest.spec

    @cached_property
    def ids(self) -> list[str]:
        """The sample ids in the order of this rank's samples."""
        return [sample_id for shard in self._shards for sample_id in shard.ids][self._rank :: self._world_size]

    def __len__(self) -> int:
        return len(range(self._rank, self._starts[-1], self._world_size))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sample(*self._locate(index))

    def by_id(self, sample_id: str) -> dict[str, Any]:
        """The sample of that id, whichever rank it belongs to.

        Raises:
            KeyError: the dataset has no such sample.
        """
        return self._sample(*self._by_id[sample_id])

    def prefetch(self, index: int) -> None:
        """Read a sample from the disk and map its pages, so that nobody waits for them later.

        It takes as long as the disk does, without holding up other threads: :class:`~sglang_capture.BlockShuffle`
        calls it on one of its own.
        """
        for value in self[index].values():
            if isinstance(value, torch.Tensor):
                value.view(torch.uint8).flatten()[:: mmap.PAGESIZE].sum()

    def metadata(self, index: int) -> dict[str, Any]:
        """What was kept beside the sample when it was packed."""
        shard, row = self._locate(index)
        return self._shards[shard].metadata[row]

    def content_key(self, index: int) -> str:
        """What stands for the content of a sample: its shard's checksum, and its number in there."""
        shard, row = self._locate(index)
        return f"{self._shards[shard].entry.xxh3_64}/{row}"

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: mappings stay behind, it maps the shards again."""
        return {name: value for name, value in self.__dict__.items() if name != "_pages"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pages = self._page_cache()

    def _page_cache(self) -> Any:
        shards = self._shards  # not `self`: a cycle would keep the mappings until the garbage collector comes by
        return lru_cache(maxsize=_MAPPED_SHARDS)(lambda number: shards[number].open())

    @cached_property
    def _by_id(self) -> dict[str, tuple[int, int]]:
        return {
            sample_id: (number, row)
            for number, shard in enumerate(self._shards)
            for row, sample_id in enumerate(shard.ids)
        }

    def _locate(self, index: int) -> tuple[int, int]:
        """The shard of this rank's sample ``index``, and its number in there."""
        try:
            position = range(self._rank, self._starts[-1], self._world_size)[index]
        except IndexError:
            raise IndexError(f"sample {index} of {len(self)}") from None
        shard = bisect.bisect_right(self._starts, position) - 1
        return shard, position - self._starts[shard]

    def _sample(self, number: int, row: int) -> dict[str, Any]:
        shard, pages = self._shards[number], self._pages(number)
        begin, end = int(shard.offsets[row]), int(shard.offsets[row + 1])
        names = (*_SAMPLE_KEYS, *self.spec.last_hidden_keys)
        tensors = {name: shard.rows(pages, name, begin, end) for name in names}
        return {"sample_id": shard.ids[row], **tensors}


def _place_in_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    if rank is None:
        rank = distributed.get_rank() if initialised else 0
    if world_size is None:
        world_size = distributed.get_world_size() if initialised else 1
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1; found rank {rank}, world_size {world_size}")
    return rank, world_size
