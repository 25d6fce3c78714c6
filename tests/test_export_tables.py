"""The exports for the libraries datasets and webdataset, read back with these libraries."""

from __future__ import annotations

import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import webdataset
from factories import make_dataset, make_dump, make_samples, make_spec

from sglang_capture.dump import Dump
from sglang_capture.export import ExportError, ExportOptions, export_dataset, huggingface
from sglang_capture.export import webdataset as webdataset_format
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.shards.manifest import read_manifest, write_manifest
from sglang_capture.verify_sources import open_source

SPEC = make_spec(last_hidden="both")
POST, PRE = "last_hidden_state", "last_hidden_state_prenorm"
FORMATS = ("huggingface", "webdataset")


def by_hand(dtype: str = "bfloat16") -> Sample:
    spec = make_spec(hidden_size=2, layers=(3, 31), dtype=dtype)
    dump = Dump(
        capture_id="by.hand",
        request_id="",
        spec=spec,
        input_ids=torch.tensor([7, 8]),
        hidden_states=torch.tensor([[[1, 2], [3, 4]], [[10, 20], [30, 40]]], dtype=spec.torch_dtype),
        last_hidden={POST: torch.tensor([[0.5, 0.25], [-1, -2]], dtype=spec.torch_dtype)},
    )
    return Sample("by.hand", dump, loss_mask=torch.tensor([0, 1]))


def write(tmp_path: Path, *samples: Sample) -> None:
    with DatasetWriter(tmp_path / "data", samples[0].dump.spec) as writer:
        writer.write_shard(samples)


def read_tars(out: Path) -> list[dict[str, Any]]:
    shards = [str(path) for path in sorted(out.glob("*.tar"))]
    return list(webdataset.WebDataset(shards, shardshuffle=False).decode())


def samples_in(out: Path, to: str) -> list[dict[str, Any]]:
    if to == "huggingface":
        return list(datasets.load_from_disk(out))
    return [{**sample["pth"], "sample_id": sample["json"]["sample_id"]} for sample in read_tars(out)]


def numbered(out: Path, to: str) -> list[Path]:
    return sorted(out.glob("*.arrow" if to == "huggingface" else "*.tar"))


def test_a_table_row_computed_by_hand(tmp_path: Path) -> None:
    write(tmp_path, by_hand())
    notes = export_dataset(tmp_path / "data", "huggingface", tmp_path / "out").notes
    table = datasets.load_from_disk(tmp_path / "out")
    assert table.column_names == ["sample_id", "input_ids", "loss_mask", "hidden_states", POST]
    row = table[0]
    assert row["sample_id"] == "by.hand"
    assert row["input_ids"].tolist() == [7, 8] and row["loss_mask"].tolist() == [0, 1]
    assert row["hidden_states"].dtype == torch.float32
    assert row["hidden_states"].tolist() == [[[1, 2], [3, 4]], [[10, 20], [30, 40]]]
    assert row[POST].tolist() == [[0.5, 0.25], [-1, -2]]
    assert "float32, because arrow has no bfloat16" in " ".join(notes)


@pytest.mark.parametrize(("dtype", "column"), [("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")])
def test_no_bit_of_a_number_is_lost_in_a_table(tmp_path: Path, dtype: str, column: str) -> None:
    (sample,) = make_dataset(tmp_path / "data", make_spec(dtype=dtype), [40])
    export_dataset(tmp_path / "data", "huggingface", tmp_path / "out")
    table = datasets.load_from_disk(tmp_path / "out")
    assert table.features["hidden_states"].dtype == column
    assert torch.equal(table[0]["hidden_states"].to(sample.dump.spec.torch_dtype), sample.dump.hidden_states)


def test_a_tar_sample_computed_by_hand(tmp_path: Path) -> None:
    sample = by_hand()
    write(tmp_path, sample)
    summary = export_dataset(tmp_path / "data", "webdataset", tmp_path / "out")
    (got,) = read_tars(tmp_path / "out")
    assert got["__key__"] == "00000000"
    assert got["json"] == {
        "sample_id": "by.hand",
        "tokens": 2,
        "layers": [3, 31],
        "last_hidden": "post",
        "dtype": "bfloat16",
    }
    expected = {
        "input_ids": torch.tensor([7, 8]),
        "loss_mask": torch.tensor([0, 1], dtype=torch.uint8),
        "hidden_states": sample.dump.hidden_states,
        POST: sample.dump.last_hidden[POST],
    }
    assert set(got["pth"]) == set(expected)
    for name, tensor in expected.items():
        assert got["pth"][name].dtype == tensor.dtype and torch.equal(got["pth"][name], tensor), name
    assert "shard-000000.tar" in " ".join(summary.notes)


@pytest.mark.parametrize("to", FORMATS)
def test_every_sample_is_read_back_in_the_order_of_the_dataset(tmp_path: Path, to: str) -> None:
    samples = make_dataset(tmp_path / "data", SPEC, [3, 5], [2])
    assert export_dataset(tmp_path / "data", to, tmp_path / "out").samples == 3
    for got, sample in zip(samples_in(tmp_path / "out", to), samples, strict=True):
        assert got["sample_id"] == sample.sample_id
        assert torch.equal(got["input_ids"], sample.dump.input_ids)
        assert torch.equal(got["hidden_states"].bfloat16(), sample.dump.hidden_states)
        for name in (POST, PRE):
            assert torch.equal(got[name].bfloat16(), sample.dump.last_hidden[name])


@pytest.mark.parametrize("to", FORMATS)
def test_samples_are_divided_over_files_by_their_size(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = huggingface if to == "huggingface" else webdataset_format
    monkeypatch.setattr(module._Job, "bytes_a_file", 6 * SPEC.bytes_per_token)
    make_dataset(tmp_path / "data", SPEC, [3, 3, 7, 2])
    export_dataset(tmp_path / "data", to, tmp_path / "out")
    assert len(numbered(tmp_path / "out", to)) == 3
    assert [len(got["input_ids"]) for got in samples_in(tmp_path / "out", to)] == [3, 3, 7, 2]
    # The dataset grows: the last file gets more samples, the others stay as they are.
    stamps = [path.stat().st_mtime_ns for path in numbered(tmp_path / "out", to)]
    with DatasetWriter(tmp_path / "data", SPEC) as writer:
        writer.write_shard(make_samples(SPEC, [1], prefix="later"))
    assert export_dataset(tmp_path / "data", to, tmp_path / "out").written == 2
    after = [path.stat().st_mtime_ns for path in numbered(tmp_path / "out", to)]
    assert after[:2] == stamps[:2] and after[2] != stamps[2]
    # Fewer samples: no file of before is left.
    export_dataset(tmp_path / "data", to, tmp_path / "out", ids=["shard0-2"])
    assert [len(got["input_ids"]) for got in samples_in(tmp_path / "out", to)] == [7]
    assert len(numbered(tmp_path / "out", to)) == 1


@pytest.mark.parametrize("to", FORMATS)
def test_samples_of_the_same_ids_and_other_content_are_written_again(tmp_path: Path, to: str) -> None:
    write(tmp_path, *(Sample(name, make_dump(SPEC, name, 3)) for name in "ab"))
    export_dataset(tmp_path / "data", to, tmp_path / "out")
    identity = read_manifest(tmp_path / "data").dataset_id
    shutil.rmtree(tmp_path / "data")
    write(tmp_path, *(Sample(name, make_dump(SPEC, name, 3, seed=9)) for name in "ab"))
    manifest = read_manifest(tmp_path / "data")
    write_manifest(tmp_path / "data", manifest.model_copy(update={"dataset_id": identity}))
    assert export_dataset(tmp_path / "data", to, tmp_path / "out").written == 2
    export_dataset(tmp_path / "data", to, tmp_path / "fresh")
    files = [[path.read_bytes() for path in numbered(tmp_path / out, to)] for out in ("out", "fresh")]
    assert files[0] == files[1]


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_file_is_written_again_with_the_same_bytes(tmp_path: Path, to: str) -> None:
    make_dataset(tmp_path / "data", SPEC, [3, 5])
    export_dataset(tmp_path / "data", to, tmp_path / "out")
    (file,) = numbered(tmp_path / "out", to)
    good = file.read_bytes()
    assert export_dataset(tmp_path / "data", to, tmp_path / "out").written == 0
    file.write_bytes(good[: len(good) // 2])
    assert export_dataset(tmp_path / "data", to, tmp_path / "out").written == 2
    assert file.read_bytes() == good


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("place", ["hidden_states", PRE])
def test_a_sample_with_nan_is_left_out_and_told(tmp_path: Path, to: str, place: str) -> None:
    bad = make_dump(SPEC, "bad", 3)
    rows = bad.hidden_states if place == "hidden_states" else bad.last_hidden[place]
    rows[1] = float("nan")
    write(tmp_path, Sample("bad", bad), *make_samples(SPEC, [2]))
    summary = export_dataset(tmp_path / "data", to, tmp_path / "out")
    assert [skip.reason for skip in summary.skipped] == [f"{place} holds NaN or Inf, first in row 1"]
    assert [got["sample_id"] for got in samples_in(tmp_path / "out", to)] == ["s0"]


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_fit_is_an_error(tmp_path: Path, to: str) -> None:
    bad = make_dump(SPEC, "bad", 3)
    bad.hidden_states[:] = float("nan")
    write(tmp_path, Sample("bad", bad))
    with pytest.raises(ExportError, match=f"no sample is fit for {to}; the first: hidden_states holds NaN"):
        export_dataset(tmp_path / "data", to, tmp_path / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_long_samples_are_cut(tmp_path: Path, to: str) -> None:
    (sample,) = make_dataset(tmp_path / "data", SPEC, [6])
    options = ExportOptions(seq_length=4)
    notes = export_dataset(tmp_path / "data", to, tmp_path / "out", options=options).notes
    (got,) = samples_in(tmp_path / "out", to)
    assert torch.equal(got["hidden_states"].bfloat16(), sample.dump.hidden_states[:4])
    assert "1 of 1 samples were cut to their first 4 tokens" in notes


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verify_gets_what_was_captured(tmp_path: Path, to: str, dtype: str) -> None:
    samples = make_dataset(tmp_path / "data", make_spec(dtype=dtype, last_hidden="both"), [3, 5])
    export_dataset(tmp_path / "data", to, tmp_path / "out")
    source = open_source(tmp_path / "out")
    assert list(source.ids) == [sample.sample_id for sample in samples]
    dump = source.load("shard0-1")
    assert dump.spec == samples[1].dump.spec
    assert torch.equal(dump.input_ids, samples[1].dump.input_ids)
    assert torch.equal(dump.hidden_states, samples[1].dump.hidden_states)
    assert all(torch.equal(dump.last_hidden[name], samples[1].dump.last_hidden[name]) for name in (POST, PRE))


def test_a_tar_says_nothing_of_the_machine_it_was_made_on(tmp_path: Path) -> None:
    write(tmp_path, by_hand())
    export_dataset(tmp_path / "data", "webdataset", tmp_path / "out")
    with tarfile.open(tmp_path / "out/shard-000000.tar") as tar:
        assert {(member.mtime, member.uname, member.gname) for member in tar} == {(0, "", "")}


def test_a_tensor_in_a_tar_has_its_own_rows_only(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_spec(hidden_size=256), [40, 1, 40])
    export_dataset(tmp_path / "data", "webdataset", tmp_path / "out")
    with tarfile.open(tmp_path / "out/shard-000000.tar") as tar:
        sizes = [member.size for member in tar if member.name.endswith(".pth")]
    assert all(size - tokens * (9 + 4 * 256 * 2) < 3000 for size, tokens in zip(sizes, (40, 1, 40), strict=True))


@pytest.mark.parametrize(("to", "library"), [*zip(FORMATS, ("datasets", "webdataset"), strict=True)])
def test_a_library_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, to: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path / "data", SPEC, [3])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ExportError, match=rf"--to {to} needs the library {library} .*sglang-capture\[export\]"):
        export_dataset(tmp_path / "data", to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
