"""Damage is found, and told with the file and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import make_dataset, make_spec

from sglang_capture import CaptureDataset
from sglang_capture.shards import DatasetError, DatasetWriter, check_dataset

SPEC = make_spec()
SHARD = "shard-000000.safetensors"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    make_dataset(tmp_path, SPEC, [3, 4], [5])
    return tmp_path


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))


def test_a_whole_dataset_passes(dataset: Path) -> None:
    assert check_dataset(dataset, deep=True).samples == 3


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_shard_is_told_by_reader_writer_and_check(dataset: Path, size: int) -> None:
    path = dataset / SHARD
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DatasetError, match=rf"{SHARD} is truncated .*restore it"):
        CaptureDataset(dataset)
    with pytest.raises(DatasetError, match=rf"{SHARD} is truncated .*restore it"):
        check_dataset(dataset)
    with pytest.raises(DatasetError, match=rf"{SHARD} is .*restore it"):
        DatasetWriter(dataset, SPEC)


def test_every_faulty_shard_is_named(dataset: Path) -> None:
    (dataset / SHARD).unlink()
    (dataset / "shard-000001.safetensors").write_bytes(b"")
    with pytest.raises(
        DatasetError, match=rf"(?s){SHARD}, named by the manifest, is missing.*shard-000001.* truncated"
    ):
        check_dataset(dataset)


def test_a_flipped_bit_is_found_by_a_deep_check_alone(dataset: Path) -> None:
    content = bytearray((dataset / SHARD).read_bytes())
    content[-30] ^= 1
    (dataset / SHARD).write_bytes(content)
    check_dataset(dataset)
    with pytest.raises(DatasetError, match=rf"{SHARD} was damaged since it was written"):
        check_dataset(dataset, deep=True)


def test_a_garbled_header_is_found(dataset: Path) -> None:
    content = bytearray((dataset / SHARD).read_bytes())
    content[8] = ord("x")
    (dataset / SHARD).write_bytes(content)
    with pytest.raises(DatasetError, match=rf"{SHARD} is no readable shard"):
        check_dataset(dataset)


def test_a_shard_of_another_dataset_in_its_place_is_found(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    make_dataset(other, make_spec(layers=(2, 30, 58)), [3, 4])
    (dataset / SHARD).write_bytes((other / SHARD).read_bytes())
    with pytest.raises(DatasetError, match=rf"{SHARD} was written for another spec"):
        check_dataset(dataset)


def test_a_newer_format_asks_for_an_upgrade_whatever_else_it_holds(dataset: Path) -> None:
    edit_manifest(dataset, format_version=2, shards="something new")
    for use in (CaptureDataset, check_dataset, lambda path: DatasetWriter(path, SPEC)):
        with pytest.raises(DatasetError, match=r"format version 2.*upgrade sglang-capture"):
            use(dataset)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"format_version": None},
        {"spec": {}},
        {"shards": [{"file": "../x", "bytes": 1, "samples": 1, "tokens": 1, "xxh3_64": "0" * 16}]},
    ],
)
def test_a_manifest_of_something_else_is_refused(dataset: Path, changes: dict) -> None:
    edit_manifest(dataset, **changes)
    with pytest.raises(DatasetError, match="not a manifest of this format"):
        CaptureDataset(dataset)


def test_a_damaged_manifest_is_told(dataset: Path) -> None:
    (dataset / "manifest.json").write_text('{"format": ')
    with pytest.raises(DatasetError, match="cannot be read"):
        CaptureDataset(dataset)
