"""Shuffling by blocks: each sample once an epoch, near its neighbours, and read before it is asked for."""

from __future__ import annotations

import mmap
import re
import threading
from pathlib import Path
from queue import Queue

import pytest
import torch
from factories import make_dataset, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sglang_capture import BlockShuffle, CaptureDataset
from sglang_capture.shards import DatasetError

SPEC = make_spec(last_hidden="both")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> CaptureDataset:
    path = tmp_path_factory.mktemp("data")
    make_dataset(path, SPEC, [1] * 37, [2] * 26)
    return CaptureDataset(path, rank=0, world_size=1)


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.integers(1, 70),
    mixed=st.integers(1, 9),
    prefetch=st.integers(0, 70),
    seed=st.integers(0, 3),
    world=st.integers(1, 3),
)
def test_every_sample_comes_once_an_epoch(
    dataset: CaptureDataset, block_size: int, mixed: int, prefetch: int, seed: int, world: int
) -> None:
    part = CaptureDataset(dataset.path, rank=world - 1, world_size=world)
    sampler = BlockShuffle(part, block_size=block_size, mixed=mixed, prefetch=prefetch, seed=seed)
    assert len(sampler) == len(part)
    for _ in range(2):
        assert sorted(sampler) == list(range(len(part)))


def test_only_the_blocks_that_are_mixed_are_read_at_a_time(dataset: CaptureDataset) -> None:
    blocks = [index // 7 for index in BlockShuffle(dataset, block_size=7, mixed=3)]  # 9 blocks of 7
    for begin in range(0, 63, 21):
        assert len(set(blocks[begin : begin + 21])) == 3
        assert len(set(blocks[begin : begin + 7])) > 1, "their samples are mixed"
    assert set(blocks[:21]) != {0, 1, 2}, "blocks come in another order"


def test_every_epoch_has_another_order_and_a_run_can_go_on(dataset: CaptureDataset) -> None:
    sampler = BlockShuffle(dataset)
    first, second = list(sampler), list(sampler)
    assert first != second
    again = BlockShuffle(dataset)
    again.set_epoch(1)
    assert list(again) == second
    assert list(BlockShuffle(dataset, seed=1)) != first


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_samples_are_read_before_they_are_asked_for(
    dataset: CaptureDataset, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    read: Queue[int] = Queue()
    monkeypatch.setattr(dataset, "prefetch", read.put)
    epoch = iter(BlockShuffle(dataset, prefetch=depth))
    order = [next(epoch)]
    ahead = [read.get(timeout=60) for _ in range(min(1 + depth, len(dataset)))]
    assert read.empty()
    order += [next(epoch) for _ in ahead[1:]]
    assert order == ahead


@pytest.mark.parametrize("depth", [0, 2])
def test_no_thread_is_left_of_an_epoch_that_is_left_in_the_middle(dataset: CaptureDataset, depth: int) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("sglang-capture-prefetch") for thread in threading.enumerate())

    epoch = iter(BlockShuffle(dataset, prefetch=depth))
    next(epoch)
    assert threads() == (1 if depth else 0)
    epoch.close()  # type: ignore[attr-defined]  # it is a generator
    assert threads() == 0


def test_what_fails_ahead_is_told(dataset: CaptureDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise DatasetError("gone")

    monkeypatch.setattr(dataset, "prefetch", fail)
    with pytest.raises(DatasetError, match="gone"):
        next(iter(BlockShuffle(dataset)))


def test_reading_ahead_maps_the_pages_of_the_sample(tmp_path: Path) -> None:
    spec = make_spec(hidden_size=4096, dtype="float32")
    make_dataset(tmp_path, spec, [40, 40])
    found = CaptureDataset(tmp_path)
    found[1]
    assert resident(tmp_path) == 0
    found.prefetch(1)
    assert resident(tmp_path) >= 40 * spec.bytes_per_token - 8 * mmap.PAGESIZE


def resident(path: Path) -> int:
    """Bytes of the mapped files below ``path`` that are in this process."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(path) in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_it_as_its_sampler(dataset: CaptureDataset, workers: int) -> None:
    sampler = BlockShuffle(dataset, seed=4)
    order = list(sampler)
    sampler.set_epoch(0)
    loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers)
    for sample, index in zip(loader, order, strict=True):
        assert sample["sample_id"] == dataset.ids[index]
        assert torch.equal(sample["hidden_states"], dataset[index]["hidden_states"])


def test_a_sample_that_is_none_cannot_be_read_ahead(dataset: CaptureDataset) -> None:
    with pytest.raises(IndexError):
        dataset.prefetch(len(dataset))


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"mixed": 0}, {"prefetch": -1}])
def test_sizes_that_make_no_sense_are_refused(dataset: CaptureDataset, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        BlockShuffle(dataset, **wrong)
