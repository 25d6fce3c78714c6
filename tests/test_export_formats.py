"""What holds for every format of one file a sample: round trips, resuming, refusals, and what is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_dataset, make_dump, make_spec

from sglang_capture.errors import UsageError
from sglang_capture.export import ExportError, ExportOptions, export_dataset, exporters, get_exporter
from sglang_capture.export.files import FileExporter
from sglang_capture.export.folder import read_lineage
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.verify_sources import open_source

FORMATS = [exporter for exporter in exporters() if isinstance(exporter, FileExporter)]
POST_ONLY = ["specforge", "specforge-dspark", "angelslim", "eagle", "torchspec"]
THREE_LAYERS = ["specforge", "angelslim", "torchspec"]
ANY_LAYERS = ["specforge-dflash", "specforge-dspark", "modelopt", "angelslim-dflash"]
NO_LAST_HIDDEN = ["specforge-dflash", "angelslim-dflash"]
CUTTERS = [exporter.name for exporter in FORMATS if "seq_length" in exporter.options]

every_format = pytest.mark.parametrize("exporter", FORMATS, ids=lambda exporter: exporter.name)


def files_below(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("data_*")}


def save_masks(path: Path, *masks: list[int], **changes: Any) -> Path:
    spec = make_spec(**changes)
    with DatasetWriter(path, spec) as writer:
        writer.write_shard(
            [
                Sample(f"s{number}", make_dump(spec, f"s{number}", len(mask), seed=number), torch.tensor(mask))
                for number, mask in enumerate(masks)
            ]
        )
    return path


@every_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_was_written_is_read_back_as_it_was_captured(tmp_path: Path, exporter: FileExporter, dtype: str) -> None:
    samples = make_dataset(tmp_path / "data", make_spec(last_hidden="both", dtype=dtype), [3, 5], [4])
    export_dataset(tmp_path / "data", exporter.name, tmp_path / "out")
    source = open_source(tmp_path / "out")
    assert sorted(source.ids) == sorted(sample.sample_id for sample in samples)
    for sample in samples:
        dump = source.load(sample.sample_id)
        assert torch.equal(dump.input_ids, sample.dump.input_ids)
        held = dump.spec.torch_dtype
        assert dump.hidden_states.shape[1] == len(dump.spec.layers)
        if dump.spec.layers:
            assert torch.equal(dump.hidden_states, sample.dump.hidden_states.to(held))
        assert tuple(dump.last_hidden) == dump.spec.last_hidden_keys
        for key, rows in dump.last_hidden.items():
            assert torch.equal(rows, sample.dump.last_hidden[key].to(held))


@every_format
def test_a_second_run_keeps_what_is_proven_and_writes_the_rest_again(tmp_path: Path, exporter: FileExporter) -> None:
    make_dataset(tmp_path / "data", make_spec(), [3, 4, 5])
    export_dataset(tmp_path / "data", exporter.name, tmp_path / "out")
    whole = files_below(tmp_path / "out")
    assert len(whole) == 3
    path = tmp_path / "out" / exporter.file_name(1)
    path.write_bytes(path.read_bytes()[:-9])
    assert export_dataset(tmp_path / "data", exporter.name, tmp_path / "out").written == 1
    assert files_below(tmp_path / "out") == whole


@every_format
def test_a_file_holds_its_own_rows_and_no_others(tmp_path: Path, exporter: FileExporter) -> None:
    samples = make_dataset(tmp_path / "data", make_spec(hidden_size=256), [40, 3, 40])
    export_dataset(tmp_path / "data", exporter.name, tmp_path / "out")
    for row, sample in enumerate(samples):
        most = sample.dump.tokens * (16 + 4 * 256 * 2) + 3500
        assert (tmp_path / "out" / exporter.file_name(row)).stat().st_size < most


@every_format
def test_a_sample_with_nan_is_left_out(tmp_path: Path, exporter: FileExporter) -> None:
    spec = make_spec()
    bad = make_dump(spec, "bad", 4)
    bad.hidden_states[2, 1, 0] = bad.last_hidden["last_hidden_state"][2, 0] = float("nan")
    with DatasetWriter(tmp_path / "data", spec) as writer:
        writer.write_shard([Sample("bad", bad), Sample("good", make_dump(spec, "good", 4))])
    summary = export_dataset(tmp_path / "data", exporter.name, tmp_path / "out")
    assert summary.samples == 1 and list(files_below(tmp_path / "out")) == [exporter.file_name(1)]
    assert [skip.sample_id for skip in summary.skipped] == ["bad"] and "first in row 2" in summary.skipped[0].reason


@every_format
def test_a_changed_file_is_told_when_it_is_read_back(tmp_path: Path, exporter: FileExporter) -> None:
    make_dataset(tmp_path / "data", make_spec(), [4])
    export_dataset(tmp_path / "data", exporter.name, tmp_path / "out")
    path = tmp_path / "out" / exporter.file_name(0)
    path.write_bytes(path.read_bytes()[:-200])
    source = open_source(tmp_path / "out")
    with pytest.raises(Exception, match=r"is not what was exported .*run the export again"):
        source.load(source.ids[0])


@pytest.mark.parametrize("name", THREE_LAYERS)
@pytest.mark.parametrize("layers", [(3, 31), (1, 2, 3, 4), (0, 3, 31)])
def test_eagle3_takes_three_outputs_of_layers(tmp_path: Path, name: str, layers: tuple[int, ...]) -> None:
    make_dataset(tmp_path / "data", make_spec(layers=layers), [3])
    with pytest.raises(ExportError, match=r"exactly 3 layers|token embeddings"):
        export_dataset(tmp_path / "data", name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ANY_LAYERS)
def test_dflash_takes_any_number_of_layers_but_no_embeddings(tmp_path: Path, name: str) -> None:
    make_dataset(tmp_path / "five", make_spec(layers=(2, 16, 31, 45, 59)), [3])
    summary = export_dataset(tmp_path / "five", name, tmp_path / "out")
    assert "[1, 15, 30, 44, 58]" in " ".join(summary.notes)
    make_dataset(tmp_path / "embedded", make_spec(layers=(0, 31)), [3])
    with pytest.raises(ExportError, match="token embeddings"):
        export_dataset(tmp_path / "embedded", name, tmp_path / "other")


@pytest.mark.parametrize("name", POST_ONLY)
@pytest.mark.parametrize("last_hidden", ["none", "pre"])
def test_a_state_before_the_norm_is_never_taken_for_one_after_it(tmp_path: Path, name: str, last_hidden: str) -> None:
    make_dataset(tmp_path / "data", make_spec(last_hidden=last_hidden), [3])
    with pytest.raises(ExportError, match=rf"after the final norm.*found last_hidden = {last_hidden}"):
        export_dataset(tmp_path / "data", name, tmp_path / "out")


def test_model_optimizer_needs_some_last_hidden_state(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_spec(last_hidden="none"), [3])
    with pytest.raises(ExportError, match="Model Optimizer needs the last hidden state"):
        export_dataset(tmp_path / "data", "modelopt", tmp_path / "out")


@pytest.mark.parametrize("name", NO_LAST_HIDDEN)
def test_dflash_needs_no_last_hidden_state(tmp_path: Path, name: str) -> None:
    make_dataset(tmp_path / "data", make_spec(last_hidden="none"), [3])
    assert export_dataset(tmp_path / "data", name, tmp_path / "out").samples == 1


@pytest.mark.parametrize("name", ["specforge-dflash", "specforge-dspark"])
def test_a_sample_at_which_specforge_stops_is_left_out(tmp_path: Path, name: str) -> None:
    data = save_masks(tmp_path / "data", [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1])
    summary = export_dataset(data, name, tmp_path / "out")
    assert [skip.sample_id for skip in summary.skipped] == ["s0", "s2", "s3"]
    assert all("two tokens in a row" in skip.reason for skip in summary.skipped)


def test_a_sample_is_judged_by_what_the_trainer_will_see_of_it(tmp_path: Path) -> None:
    data = save_masks(tmp_path / "data", [0, 0, 1, 1], [1, 1, 0, 0])
    summary = export_dataset(data, "specforge-dflash", tmp_path / "out", options=ExportOptions(seq_length=3))
    assert [skip.sample_id for skip in summary.skipped] == ["s0"]


@pytest.mark.parametrize("mask", [[1, 0, 0, 1], [0, 0, 0, 0]])
def test_a_sample_on_which_eagle_divides_by_zero_is_left_out(tmp_path: Path, mask: list[int]) -> None:
    data = save_masks(tmp_path / "data", mask, [0, 0, 1, 0])
    summary = export_dataset(data, "eagle", tmp_path / "out")
    assert [skip.sample_id for skip in summary.skipped] == ["s0"]


@pytest.mark.parametrize("name", ["specforge", "modelopt", "angelslim", "torchspec"])
def test_samples_without_supervised_tokens_are_told_and_kept(tmp_path: Path, name: str) -> None:
    data = save_masks(tmp_path / "data", [0, 0, 0], [0, 1, 1])
    summary = export_dataset(data, name, tmp_path / "out")
    assert summary.samples == 2
    assert any(note.startswith("1 of 2 samples have a loss mask of all zeros") for note in summary.notes)


@pytest.mark.parametrize("name", CUTTERS)
def test_longer_samples_are_cut(tmp_path: Path, name: str) -> None:
    samples = make_dataset(tmp_path / "data", make_spec(), [9, 4])
    summary = export_dataset(tmp_path / "data", name, tmp_path / "out", options=ExportOptions(seq_length=4))
    source = open_source(tmp_path / "out")
    assert torch.equal(source.load("shard0-0").input_ids, samples[0].dump.input_ids[:4])
    assert source.load("shard0-1").tokens == 4
    assert "1 of 2 samples were cut to their first 4 tokens" in summary.notes
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("data_*")]
    assert max(sizes) - min(sizes) < 100  # nothing of what was cut off is in the file


def test_a_draft_vocabulary_has_the_most_frequent_supervised_tokens(tmp_path: Path) -> None:
    spec = make_spec(vocab_size=6)
    dump = make_dump(spec, "a", 5)
    dump.input_ids[:] = torch.tensor([0, 5, 5, 2, 0])
    with DatasetWriter(tmp_path / "data", spec) as writer:
        writer.write_shard([Sample("a", dump, loss_mask=torch.tensor([0, 1, 1, 1, 0]))])
    options = ExportOptions(draft_vocab_size=2)
    export_dataset(tmp_path / "data", "angelslim", tmp_path / "out", options=options)
    content = torch.load(tmp_path / "out/vocab_mapping.pt", weights_only=True)
    assert content["d2t"].tolist() == [2, 4]  # draft token 0 is 2, draft token 1 is 5
    assert content["t2d"].tolist() == [False, False, True, False, False, True]


def test_a_draft_vocabulary_above_the_targets_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_spec(vocab_size=6), [3])
    with pytest.raises(ExportError, match="at most the 6 tokens of the target's; found 7"):
        export_dataset(tmp_path / "data", "angelslim", tmp_path / "out", options=ExportOptions(draft_vocab_size=7))
    assert not (tmp_path / "out").exists()


def test_an_option_that_a_format_does_not_take_names_those_that_do(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_spec(), [3])
    with pytest.raises(UsageError, match=r"specforge takes no --fp8; formats that do: speculators"):
        export_dataset(tmp_path / "data", "specforge", tmp_path / "out", options=ExportOptions(fp8=True))
    for option in ("model", "seq_length", "draft_vocab_size"):
        options = ExportOptions(**{option: "model" if option == "model" else 2})
        with pytest.raises(UsageError, match=f"safetensors takes no --{option.replace('_', '-')}"):
            export_dataset(tmp_path / "data", "safetensors", tmp_path / "out", options=options)


def test_an_export_with_other_options_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_spec(), [5])
    export_dataset(tmp_path / "data", "specforge", tmp_path / "out", options=ExportOptions(seq_length=4))
    lineage = read_lineage(tmp_path / "out")
    assert lineage is not None and lineage.options == ExportOptions(seq_length=4)
    with pytest.raises(ExportError, match="holds an export with --seq-length 4, and not with no options"):
        export_dataset(tmp_path / "data", "specforge", tmp_path / "out")


def test_specforge_goes_by_a_longer_name_too() -> None:
    assert get_exporter("specforge-eagle3") is get_exporter("specforge")
