"""What a trainer gets: every sample once, as it was captured, without a copy."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import make_dataset, make_dump, make_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sglang_capture import CaptureDataset
from sglang_capture.errors import UsageError
from sglang_capture.shards import DatasetError, DatasetWriter, Sample
from sglang_capture.shards import reader as reader_module

SPEC = make_spec(last_hidden="both")
SHARDS = ([3, 1, 7], [2], [5, 4])


@pytest.fixture
def dataset(tmp_path: Path) -> tuple[Path, list[Sample]]:
    return tmp_path, make_dataset(tmp_path, SPEC, *SHARDS)


def assert_same(found: dict, sample: Sample) -> None:
    assert found["sample_id"] == sample.sample_id
    assert torch.equal(found["input_ids"], sample.dump.input_ids)
    assert torch.equal(found["hidden_states"], sample.dump.hidden_states)
    for key, rows in sample.dump.last_hidden.items():
        assert torch.equal(found[key], rows)


def test_every_sample_comes_back_as_it_was_captured(dataset: tuple[Path, list[Sample]]) -> None:
    path, samples = dataset
    found = CaptureDataset(path)
    assert len(found) == len(samples)
    assert found.ids == [sample.sample_id for sample in samples]
    assert found.spec == SPEC
    for number, sample in enumerate(samples):
        assert_same(found[number], sample)
        assert_same(found[number - len(samples)], sample)
        assert_same(found.by_id(sample.sample_id), sample)
    assert [sample["sample_id"] for sample in found] == found.ids
    with pytest.raises(IndexError):
        found[len(samples)]
    with pytest.raises(KeyError):
        found.by_id("absent")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), max_size=4),
    last_hidden=st.sampled_from(["none", "post", "pre", "both"]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    hidden=st.integers(1, 9),
    world=st.integers(1, 5),
)
def test_the_ranks_together_see_each_sample_once(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[int]],
    last_hidden: str,
    dtype: str,
    hidden: int,
    world: int,
) -> None:
    path = tmp_path_factory.mktemp("data")
    samples = make_dataset(path, make_spec(last_hidden=last_hidden, dtype=dtype, hidden_size=hidden), *shards)
    by_id = {sample.sample_id: sample for sample in samples}
    seen = []
    for rank in range(world):
        part = CaptureDataset(path, rank=rank, world_size=world)
        assert len(part) == len(part.ids)
        for number, sample_id in enumerate(part.ids):
            assert_same(part[number], by_id[sample_id])
        seen += part.ids
    assert sorted(seen) == sorted(by_id)


@pytest.mark.parametrize("counted", [0, 2])
def test_a_label_is_the_dumps_whatever_the_metadata_say(tmp_path: Path, counted: int) -> None:
    dump = replace(make_dump(SPEC, "a", 3), zero_rows=counted)
    with DatasetWriter(tmp_path, SPEC) as writer:
        writer.write_shard([Sample("a", dump, None, {"zero_rows": 7, "nonfinite_rows": 7, "k": 1})])
    assert CaptureDataset(tmp_path).metadata(0) == {"k": 1, **({"zero_rows": counted} if counted else {})}


def test_metadata_and_mask_stay_with_their_sample(tmp_path: Path) -> None:
    mask = torch.tensor([0, 1, 1])
    with DatasetWriter(tmp_path, SPEC) as writer:
        writer.write_shard(
            [Sample("a", make_dump(SPEC, "a", 2)), Sample("b", make_dump(SPEC, "b", 3), mask, {"k": [1]})]
        )
        writer.write_shard([Sample("c", make_dump(SPEC, "c", 1))])
    found = CaptureDataset(tmp_path)
    assert [found.metadata(number) for number in range(3)] == [{}, {"k": [1]}, {}]
    assert found[1]["loss_mask"].tolist() == mask.tolist()


def test_a_sample_is_a_view_of_the_file_and_of_its_own_rows_only(dataset: tuple[Path, list[Sample]]) -> None:
    path, _ = dataset
    found = CaptureDataset(path)
    first, again = found[2], found[2]
    for name in ("input_ids", "loss_mask", "hidden_states", *SPEC.last_hidden_keys):
        assert first[name].data_ptr() == again[name].data_ptr()
        assert first[name].untyped_storage().nbytes() == first[name].nbytes


def test_writing_into_a_sample_never_reaches_the_file(dataset: tuple[Path, list[Sample]]) -> None:
    path, samples = dataset
    CaptureDataset(path)[0]["hidden_states"].zero_()
    assert_same(CaptureDataset(path)[0], samples[0])


def test_samples_outlive_the_mapping_of_their_shard(
    dataset: tuple[Path, list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, samples = dataset
    monkeypatch.setattr(reader_module, "_MAPPED_SHARDS", 1)
    found = CaptureDataset(path)
    for sample, kept in zip(samples, list(found), strict=True):
        assert_same(kept, sample)


def test_no_shard_is_mapped_any_more_once_nothing_of_a_dataset_is_left(dataset: tuple[Path, list[Sample]]) -> None:
    path, _ = dataset

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    found = CaptureDataset(path)
    kept = found[0]
    gc.disable()
    try:
        del found
        assert mapped()
        del kept
        assert not mapped()
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_hand_over_every_sample(dataset: tuple[Path, list[Sample]], method: str) -> None:
    path, samples = dataset
    found = CaptureDataset(path)
    found[0]
    loader = DataLoader(found, batch_size=None, num_workers=2, multiprocessing_context=method)
    for got, sample in zip(loader, samples, strict=True):
        assert_same(got, sample)


def test_it_is_pickled_without_its_mappings(dataset: tuple[Path, list[Sample]]) -> None:
    path, samples = dataset
    found = CaptureDataset(path, rank=1, world_size=2)
    found[0]
    assert_same(pickle.loads(pickle.dumps(found))[0], samples[1])


def test_rank_and_world_size_come_from_torch_distributed(
    dataset: tuple[Path, list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, samples = dataset
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert CaptureDataset(path).ids == [sample.sample_id for sample in samples[1::4]]
    assert len(CaptureDataset(path, rank=0, world_size=1)) == len(samples)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (1, None)])
def test_a_rank_outside_the_world_is_refused(dataset: tuple[Path, list[Sample]], rank: int, world: int | None) -> None:
    with pytest.raises(ValueError, match="rank must be from 0"):
        CaptureDataset(dataset[0], rank=rank, world_size=world)


def test_a_dataset_without_shards_is_empty(tmp_path: Path) -> None:
    make_dataset(tmp_path, SPEC)
    assert len(CaptureDataset(tmp_path)) == 0


def test_a_place_without_a_manifest_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"is no dataset: expected manifest.json"):
        CaptureDataset(tmp_path / "absent")


def test_a_folder_of_datasets_names_those_in_it(tmp_path: Path) -> None:
    for name in ("dataset-b", "dataset-a"):
        make_dataset(tmp_path / name, SPEC)
    with pytest.raises(UsageError, match=r"Give one of those in it: dataset-a, dataset-b$"):
        CaptureDataset(tmp_path)
