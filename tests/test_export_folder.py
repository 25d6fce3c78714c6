"""What every export keeps to: it goes on where it stopped, trusts content only, and never mixes two datasets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import make_dataset, make_dump, make_samples, make_spec

from sglang_capture.dump import Dump
from sglang_capture.errors import UsageError
from sglang_capture.export import ExportError, ExportSummary, export_dataset, exporters, folder
from sglang_capture.shards import DatasetError, DatasetWriter, Sample
from sglang_capture.shards.manifest import read_manifest, write_manifest

SPEC = make_spec()
FILE = "rows_0-2000/data_1.ckpt"

DIES_AFTER_TWO = """
import os, sys
from pathlib import Path
from sglang_capture.export import export_dataset
die = lambda done, total: os._exit(9) if done == 2 else None
export_dataset(Path(sys.argv[1]), "specforge", Path(sys.argv[2]), progress=die)
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", SPEC, [3, 4], [5, 2])
    return tmp_path / "data"


def export(dataset: Path, **options: object) -> ExportSummary:
    return export_dataset(dataset, "specforge", dataset.parent / "out", **options)


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.ckpt"))}


def test_a_second_run_keeps_what_is_proven(dataset: Path) -> None:
    first, out = export(dataset), dataset.parent / "out"
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.ckpt")}
    second = export(dataset)
    assert (first.written, second.written, second.samples) == (4, 0, 4)
    assert second.bytes == first.bytes == sum(len(content) for content in contents(out).values())
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.ckpt")}


@pytest.mark.parametrize("fault", ["truncated", "flipped", "swapped", "gone", "unrecorded"])
def test_a_file_whose_content_is_not_proven_is_written_again(dataset: Path, fault: str) -> None:
    export(dataset)
    out = dataset.parent / "out"
    whole, path = contents(out), out / FILE
    if fault == "truncated":
        path.write_bytes(whole[FILE][:-100])
    elif fault == "flipped":
        path.write_bytes(whole[FILE][:-1] + bytes([whole[FILE][-1] ^ 1]))
    elif fault == "swapped":
        path.write_bytes(whole["rows_0-2000/data_0.ckpt"])
    elif fault == "gone":
        path.unlink()
    else:
        records = out / "sglang_capture_export.jsonl"
        records.write_bytes(records.read_bytes()[:-20])
        path = out / "rows_0-2000/data_3.ckpt"
        path.write_bytes(b"of a crashed run")
    summary = export(dataset)
    assert (summary.written, summary.samples) == (1, 4)
    assert contents(out) == whole
    assert export(dataset).written == 0


def test_a_killed_export_goes_on_where_it_stopped(dataset: Path) -> None:
    out = dataset.parent / "out"
    # A process of its own, not a fork: torch's threads do not live on in a fork.
    assert subprocess.run([sys.executable, "-c", DIES_AFTER_TWO, str(dataset), str(out)], check=False).returncode == 9
    assert json.loads((out / "sglang_capture_export.json").read_text())["summary"] is None
    summary = export(dataset)
    assert (summary.written, summary.samples) == (2, 4)
    assert [path for path in out.rglob("*") if path.name.endswith(".tmp")] == []
    assert json.loads((out / "sglang_capture_export.json").read_text())["summary"]["samples"] == 4


def test_a_dataset_that_grew_is_exported_on(dataset: Path) -> None:
    export(dataset)
    with DatasetWriter(dataset, SPEC) as writer:
        writer.write_shard(make_samples(SPEC, [2], prefix="later"))
    summary = export(dataset)
    assert (summary.written, summary.samples) == (1, 5)


def restored_with(dataset: Path, *dumps: Dump) -> None:
    """The dataset is put back as it was before its last shard, and gets another one."""
    manifest = read_manifest(dataset)
    (dataset / manifest.shards[-1].file).unlink()
    write_manifest(dataset, manifest.model_copy(update={"shards": manifest.shards[:-1]}))
    with DatasetWriter(dataset, SPEC) as writer:
        writer.write_shard([Sample(dump.capture_id, dump) for dump in dumps])


def test_a_sample_of_the_same_id_and_other_content_is_written_again(dataset: Path, tmp_path: Path) -> None:
    export(dataset)
    ids = ["shard1-0", "shard1-1"]
    restored_with(dataset, *(make_dump(SPEC, name, tokens, seed=9) for name, tokens in zip(ids, (5, 2), strict=True)))
    assert export(dataset).written == 2
    export_dataset(dataset, "specforge", tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    assert export(dataset).written == 0


def test_nothing_is_left_of_a_sample_whose_other_content_no_trainer_must_get(dataset: Path) -> None:
    export(dataset)
    bad = make_dump(SPEC, "shard1-1", 2)
    bad.hidden_states[0] = float("nan")
    restored_with(dataset, make_dump(SPEC, "shard1-0", 5), bad)
    assert [skip.sample_id for skip in export(dataset).skipped] == ["shard1-1"]
    assert "rows_0-2000/data_3.ckpt" not in contents(dataset.parent / "out")
    assert "rows_0-2000/data_3.ckpt" not in folder.read_records(dataset.parent / "out")


@pytest.mark.parametrize("to", ["specforge", "safetensors", "webdataset", "huggingface"])
def test_an_export_says_what_made_its_prompts(dataset: Path, tmp_path: Path, to: str) -> None:
    lineages = [{"tokenizer": "1f", "template": "2e", "mask_rule": rule, "max_length": None} for rule in ("a/1", "a/2")]

    def told() -> object:
        export_dataset(dataset, to, tmp_path / "out")
        return json.loads((tmp_path / "out/sglang_capture_export.json").read_text())["prompt_lineages"]

    assert told() == []
    for number, lineage in enumerate(lineages):
        with DatasetWriter(dataset, SPEC) as writer:
            (sample,) = make_samples(SPEC, [3], prefix=f"later{number}-")
            writer.write_shard([replace(sample, metadata={"prompt_lineage": lineage})])
        assert told() == lineages[: number + 1]


def test_some_samples_by_id_keep_their_numbers(dataset: Path) -> None:
    summary = export(dataset, ids=["shard1-1", "shard0-1", "shard1-1"])
    assert summary.samples == 2
    assert set(contents(dataset.parent / "out")) == {"rows_0-2000/data_1.ckpt", "rows_0-2000/data_3.ckpt"}


def test_samples_of_earlier_runs_are_told(dataset: Path) -> None:
    assert not any("earlier runs" in note for note in export(dataset, ids=["shard1-1"]).notes)
    summary = export(dataset, ids=["shard0-1"])
    assert summary.samples == 1
    assert any("earlier runs" in note and note.endswith(": 1") for note in summary.notes)
    assert not any("earlier runs" in note for note in export(dataset).notes)


def test_an_export_of_another_dataset_is_refused(dataset: Path, tmp_path: Path) -> None:
    export(dataset)
    before = contents(tmp_path / "out")
    make_dataset(tmp_path / "other", SPEC, [3, 4], [5, 2])
    with pytest.raises(ExportError, match=r"holds the specforge export of .*data.*give another folder"):
        export_dataset(tmp_path / "other", "specforge", tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_folder_with_strange_files_is_refused(dataset: Path) -> None:
    out = dataset.parent / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="no export of ours wrote"):
        export(dataset)
    (out / "notes.txt").unlink()
    assert export(dataset).samples == 4


def test_a_file_in_place_of_the_folder_is_refused(dataset: Path) -> None:
    (dataset.parent / "out").write_text("")
    with pytest.raises(ExportError, match="is no folder"):
        export(dataset)


def test_two_exports_into_one_folder_are_refused(dataset: Path) -> None:
    export(dataset)
    with (dataset.parent / "out/sglang_capture_export.jsonl").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExportError, match="another process is exporting"):
            export(dataset)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("place", ["hidden_states", "last_hidden_state"])
def test_a_sample_with_nan_or_inf_is_left_out_and_told(tmp_path: Path, value: float, dtype: str, place: str) -> None:
    spec = make_spec(dtype=dtype)
    bad = make_dump(spec, "bad", 9)
    rows = bad.hidden_states if place == "hidden_states" else bad.last_hidden[place]
    rows[6, ..., 2] = value
    with DatasetWriter(tmp_path / "data", spec) as writer:
        writer.write_shard([Sample("bad", bad), *make_samples(spec, [3])])
    summary = export(tmp_path / "data")
    assert summary.samples == 1 and not summary.complete
    assert [(skip.sample_id, skip.reason) for skip in summary.skipped] == [
        ("bad", f"{place} holds NaN or Inf, first in row 6")
    ]
    assert set(contents(tmp_path / "out")) == {"rows_0-2000/data_1.ckpt"}


def test_what_bfloat16_cannot_hold_is_left_out_too(tmp_path: Path) -> None:
    spec = make_spec(dtype="float32")
    bad = make_dump(spec, "bad", 3)
    bad.hidden_states[1] = 3.4e38
    with DatasetWriter(tmp_path / "data", spec) as writer:
        writer.write_shard([Sample("bad", bad)])
    assert len(export(tmp_path / "data").skipped) == 1


def test_a_full_disk_is_told_and_the_export_goes_on_later(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = folder._HashingFile.write
    monkeypatch.setattr(folder._HashingFile, "write", fail)
    with pytest.raises(ExportError, match=r"no room left .*goes on from here"):
        export(dataset)
    assert [path for path in (dataset.parent / "out").rglob("*") if path.suffix in (".ckpt", ".tmp")] == []
    monkeypatch.setattr(folder._HashingFile, "write", original)
    assert export(dataset).samples == 4


def test_progress_counts_every_sample(dataset: Path) -> None:
    seen: list[tuple[int, int]] = []
    export(dataset, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_unknown_format_lists_the_known_ones(dataset: Path) -> None:
    with pytest.raises(UsageError) as told:
        export_dataset(dataset, "Spec-Forge", dataset.parent / "out")
    first, *formats = str(told.value).splitlines()
    assert first == "unknown export format 'Spec-Forge': did you mean specforge? The formats are"
    assert formats[0].split(maxsplit=1) == ["specforge", "SpecForge EAGLE-3, offline (.ckpt, bfloat16)"]
    assert {line.split()[0] for line in formats} == {exporter.name for exporter in exporters()}
    assert len(formats) == len(exporters()) and max(map(len, formats)) <= 100


def test_a_format_like_none_that_is_known_is_not_guessed_at(dataset: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown export format 'zzz'\. The formats are\n  specforge "):
        export_dataset(dataset, "zzz", dataset.parent / "out")


def test_unknown_ids_are_named(dataset: Path) -> None:
    with pytest.raises(UsageError, match=r"1 of 2 sample ids are not in .*: nobody"):
        export(dataset, ids=["shard0-0", "nobody"])


def test_nothing_to_export_is_an_error(dataset: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "empty", SPEC)
    with pytest.raises(ExportError, match="nothing to export"):
        export_dataset(tmp_path / "empty", "specforge", tmp_path / "out")


def test_a_place_without_a_dataset_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is no dataset"):
        export(tmp_path)


def test_format_names_are_unique_and_described() -> None:
    names = [exporter.name for exporter in exporters()]
    assert len(set(names)) == len(names)
    assert all(exporter.description for exporter in exporters())


def test_every_format_is_in_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs/export.md").read_text()
    assert all(f"| `{exporter.name}` |" in text for exporter in exporters())


def test_a_dump_of_a_slice_is_written_with_its_own_rows_only(tmp_path: Path) -> None:
    whole = make_dump(SPEC, "a", 9)
    part = replace(
        whole,
        input_ids=whole.input_ids[2:5],
        hidden_states=whole.hidden_states[2:5],
        last_hidden={key: rows[2:5] for key, rows in whole.last_hidden.items()},
    )
    with DatasetWriter(tmp_path / "data", SPEC) as writer:
        writer.write_shard([Sample("a", part)])
    export(tmp_path / "data")
    content = torch.load(tmp_path / "out/rows_0-2000/data_0.ckpt", weights_only=True)
    assert torch.equal(content["aux_hidden_state"][0], part.hidden_states.flatten(1))
