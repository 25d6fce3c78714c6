"""Shuffling by blocks: each sample once an epoch, near its neighbours, and announced before it is asked for."""

from __future__ import annotations

import mmap

import pytest
import torch
from factories import make_dataset, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sglang_capture import BlockShuffle, CaptureDataset
from sglang_capture.shards import reader as reader_module

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


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_samples_are_announced_before_they_are_asked_for(
    dataset: CaptureDataset, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    told: list[int] = []
    monkeypatch.setattr(dataset, "prefetch", told.append)
    order = []
    for index in BlockShuffle(dataset, prefetch=depth):
        order.append(index)
        assert len(told) == (min(len(order) + depth, len(dataset)) if depth else 0)
    assert told == (order if depth else [])


def test_what_is_announced_are_the_pages_of_the_sample(
    dataset: CaptureDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_READ_AHEAD", mmap.PAGESIZE)
    asked: list[tuple[int, int, int]] = []

    class Pages:
        def madvise(self, advice: int, begin: int, length: int) -> None:
            asked.append((advice, begin, length))

    number, row = 1, 25
    shard = reader_module.Shard(dataset.path, dataset.manifest.shards[number])
    shard.prefetch(Pages(), row, ["hidden_states", "loss_mask"])  # type: ignore[arg-type]
    announced = {page for _, begin, length in asked for page in range(begin, begin + length)}
    for name in ("hidden_states", "loss_mask"):
        place = shard.layout.tensors[name]
        assert set(range(place.begin + 50 * place.row_bytes, place.begin + 52 * place.row_bytes)) <= announced
    assert all(advice == mmap.MADV_WILLNEED and begin % mmap.PAGESIZE == 0 for advice, begin, _ in asked)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_it_as_its_sampler(dataset: CaptureDataset, workers: int) -> None:
    sampler = BlockShuffle(dataset, seed=4)
    order = list(sampler)
    sampler.set_epoch(0)
    loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=workers)
    for sample, index in zip(loader, order, strict=True):
        assert sample["sample_id"] == dataset.ids[index]
        assert torch.equal(sample["hidden_states"], dataset[index]["hidden_states"])


def test_a_sample_that_is_none_cannot_be_announced(dataset: CaptureDataset) -> None:
    with pytest.raises(IndexError):
        dataset.prefetch(len(dataset))


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"mixed": 0}, {"prefetch": -1}])
def test_sizes_that_make_no_sense_are_refused(dataset: CaptureDataset, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        BlockShuffle(dataset, **wrong)
