"""speculators' table and files, read with the libraries that speculators reads them with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import load_from_disk
from factories import make_dataset, make_dump, make_samples, make_spec
from safetensors.torch import load_file

from sglang_capture.dump import Dump
from sglang_capture.export import ExportError, ExportOptions, ExportSummary, export_dataset
from sglang_capture.export.speculators import quantize, restore
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.verify_sources import open_source

SPEC = make_spec(last_hidden="pre")
PRE = "last_hidden_state_prenorm"


def export(tmp_path: Path, **options: Any) -> ExportSummary:
    return export_dataset(tmp_path / "data", "speculators", tmp_path / "out", options=ExportOptions(**options))


def load_as_speculators(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The reading rule of speculators 0.9 (ArrowDataset with FP8Transfer); see docs/export.md."""
    table, batch = load_from_disk(folder), []
    for row in range(len(table)):
        loaded = load_file(folder / f"hidden_states/hs_{row}.safetensors")
        if "hidden_states_scales" in loaded:
            scales = loaded.pop("hidden_states_scales").to(torch.bfloat16)
            loaded["hidden_states"] = loaded["hidden_states"].to(torch.bfloat16) * scales
        assert torch.equal(loaded["token_ids"], table[row]["input_ids"])
        batch.append(
            {
                "hidden_states": loaded["hidden_states"][:, :-1].flatten(1),
                "input_ids": loaded["token_ids"],
                "verifier_last_hidden_states": loaded["hidden_states"][:, -1],
                "loss_mask": table[row]["loss_mask"],
                "seq_len": table.with_format(None)["seq_len"][row],
            }
        )
    return batch


def by_hand() -> Sample:
    spec = make_spec(hidden_size=2, layers=(3, 31), last_hidden="pre", vocab_size=9)
    rows = [[[1.0, 2.0], [3.0, 4.0]], [[10.0, 20.0], [30.0, 40.0]]]
    dump = Dump(
        capture_id="hand",
        request_id="",
        spec=spec,
        input_ids=torch.tensor([7, 8]),
        hidden_states=torch.tensor(rows, dtype=torch.bfloat16),
        last_hidden={PRE: torch.tensor([[0.5, 0.25], [-1.0, -2.0]], dtype=torch.bfloat16)},
    )
    return Sample("hand", dump, loss_mask=torch.tensor([0, 1]))


def write(tmp_path: Path, *samples: Sample) -> None:
    with DatasetWriter(tmp_path / "data", samples[0].dump.spec) as writer:
        writer.write_shard(samples)


def test_a_sample_computed_by_hand(tmp_path: Path) -> None:
    write(tmp_path, by_hand())
    export(tmp_path)
    content = load_file(tmp_path / "out/hidden_states/hs_0.safetensors")
    assert set(content) == {"token_ids", "hidden_states"}
    assert content["token_ids"].tolist() == [7, 8] and content["token_ids"].dtype == torch.int64
    assert content["hidden_states"].dtype == torch.bfloat16
    assert content["hidden_states"].tolist() == [[[1, 2], [3, 4], [0.5, 0.25]], [[10, 20], [30, 40], [-1, -2]]]
    table = load_from_disk(tmp_path / "out")
    assert table.column_names == ["input_ids", "loss_mask", "seq_len"]
    assert table.format["type"] == "torch"
    assert table[0]["input_ids"].tolist() == [7, 8] and table[0]["loss_mask"].tolist() == [0, 1]
    assert table[0]["loss_mask"].dtype == torch.int64 and int(table[0]["seq_len"]) == 2


def test_every_sample_is_read_back_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    samples = make_dataset(tmp_path / "data", SPEC, [3, 5], [2])
    assert export(tmp_path).samples == 3
    for got, sample in zip(load_as_speculators(tmp_path / "out"), samples, strict=True):
        assert torch.equal(got["input_ids"], sample.dump.input_ids)
        assert torch.equal(got["hidden_states"], sample.dump.hidden_states.flatten(1))
        assert torch.equal(got["verifier_last_hidden_states"], sample.dump.last_hidden[PRE])
        assert got["loss_mask"].tolist() == [1] * sample.dump.tokens
        assert got["seq_len"] == sample.dump.tokens


def test_a_sample_left_out_leaves_no_hole(tmp_path: Path) -> None:
    bad = make_dump(SPEC, "bad", 3)
    bad.last_hidden[PRE][2] = float("inf")
    first, last = make_samples(SPEC, [2, 4])
    write(tmp_path, first, Sample("bad", bad), last)
    summary = export(tmp_path)
    assert [skip.reason for skip in summary.skipped] == [f"{PRE} holds NaN or Inf, first in row 2"]
    got = load_as_speculators(tmp_path / "out")
    assert [len(sample["input_ids"]) for sample in got] == [2, 4]
    assert torch.equal(got[1]["hidden_states"], last.dump.hidden_states.flatten(1))


def test_fp8_is_scaled_by_the_largest_number_of_each_token(tmp_path: Path) -> None:
    write(tmp_path, by_hand())
    notes = " ".join(export(tmp_path, fp8=True).notes)
    content = load_file(tmp_path / "out/hidden_states/hs_0.safetensors")
    assert content["hidden_states"].dtype == torch.float8_e4m3fn
    assert content["hidden_states_scales"].dtype == torch.float32
    # 448 is the largest number of the type; 4 and 40 are the largest of the two tokens.
    assert content["hidden_states_scales"].flatten().tolist() == pytest.approx([4 / 448, 40 / 448])
    assert content["hidden_states_scales"].shape == (2, 1, 1)
    # 1 / (4 / 448) = 112, 224, 336 → 320, 448: three bits of fraction, halves to even.
    assert content["hidden_states"].float()[0].tolist() == [[112, 224], [320, 448], [56, 28]]
    assert "float8_e4m3fn" in notes and "--hidden-states-backend fp8" in notes


def test_fp8_comes_back_within_its_precision() -> None:
    states = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(0))
    stored, scales = quantize(states)
    back = restore({"hidden_states": stored, "hidden_states_scales": scales}).float()
    large = states.abs() > states.abs().amax(dim=(1, 2), keepdim=True) / 28672  # smaller ones are subnormal
    assert float(large.float().mean()) > 0.99
    assert float(((back - states) / states).abs()[large].max()) < 2**-4 + 2**-7


def test_a_token_of_zeros_stays_zero_in_fp8() -> None:
    stored, scales = quantize(torch.zeros(1, 2, 4))
    assert float(scales) == pytest.approx(1e-12) and bool((stored.float() == 0).all())


@pytest.mark.parametrize(("kept", "told"), [("post", "cannot be turned back.*LAST_HIDDEN=pre"), ("none", "= none: ")])
def test_captures_without_the_state_before_the_norm_are_refused(tmp_path: Path, kept: str, told: str) -> None:
    make_dataset(tmp_path / "data", make_spec(last_hidden=kept), [2])
    with pytest.raises(ExportError, match=told):
        export(tmp_path)
    assert not (tmp_path / "out").exists()


def test_both_last_hidden_states_give_the_one_before_the_norm(tmp_path: Path) -> None:
    (sample,) = make_dataset(tmp_path / "data", make_spec(last_hidden="both"), [4])
    export(tmp_path)
    (got,) = load_as_speculators(tmp_path / "out")
    assert torch.equal(got["verifier_last_hidden_states"], sample.dump.last_hidden[PRE])


def test_frequencies_and_maps_are_in_the_trainers_form(tmp_path: Path) -> None:
    write(tmp_path, by_hand())
    export(tmp_path, draft_vocab_size=3)
    assert torch.load(tmp_path / "out/token_freq.pt", weights_only=True) == {8: 1}
    offsets, known = (numpy.load(tmp_path / f"out/{name}-3.npy") for name in ("d2t", "t2d"))
    assert offsets.tolist() == [0, 0, 6] and offsets.dtype == numpy.int64
    assert known.tolist() == [True, True, False, False, False, False, False, False, True]


def test_maps_that_the_trainer_has_made_are_told(tmp_path: Path) -> None:
    write(tmp_path, by_hand())
    export(tmp_path)
    (tmp_path / "out/d2t-4.npy").write_bytes(b"made by the trainer")
    assert "d2t-4.npy were made by the trainer" in " ".join(export(tmp_path).notes)


def test_long_samples_are_cut_in_the_table_and_the_files(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [3, 6])
    summary = export(tmp_path, seq_length=4)
    assert [len(got["hidden_states"]) for got in load_as_speculators(tmp_path / "out")] == [3, 4]
    assert "1 of 2 samples were cut to their first 4 tokens" in summary.notes


def test_a_second_run_keeps_the_files_and_makes_the_table_anew(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [3, 5])
    export(tmp_path)
    states = sorted((tmp_path / "out/hidden_states").iterdir())
    stamps = [path.stat().st_mtime_ns for path in states]
    (tmp_path / "out/data-00000.arrow").write_bytes(b"damaged")
    assert export(tmp_path).written == 0
    assert [path.stat().st_mtime_ns for path in states] == stamps
    assert len(load_as_speculators(tmp_path / "out")) == 2


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [3, 5])
    export(tmp_path)
    path = tmp_path / "out/hidden_states/hs_1.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert export(tmp_path).written == 1
    assert path.read_bytes() == good


def test_other_ids_give_the_samples_of_the_last_run_only(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [3, 5, 2])
    export(tmp_path)
    export_dataset(tmp_path / "data", "speculators", tmp_path / "out", ids=["shard0-1"])
    assert [len(got["input_ids"]) for got in load_as_speculators(tmp_path / "out")] == [5]
    assert [path.name for path in (tmp_path / "out/hidden_states").iterdir()] == ["hs_0.safetensors"]


def test_a_dataset_that_grew_is_exported_on(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [3])
    export(tmp_path)
    with DatasetWriter(tmp_path / "data", SPEC) as writer:
        writer.write_shard(make_samples(SPEC, [2], prefix="later"))
    assert export(tmp_path).written == 1
    assert [len(got["input_ids"]) for got in load_as_speculators(tmp_path / "out")] == [3, 2]


def test_a_run_that_is_under_way_cannot_be_loaded(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [3, 5])
    export(tmp_path)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_dataset(tmp_path / "data", "speculators", tmp_path / "out", progress=stop)
    with pytest.raises(FileNotFoundError, match="neither a `Dataset` directory"):
        load_from_disk(tmp_path / "out")
    assert export(tmp_path).written == 0


@pytest.mark.parametrize("fp8", [False, True])
def test_verify_reads_rows_and_files_as_the_trainer_pairs_them(tmp_path: Path, fp8: bool) -> None:
    samples = make_dataset(tmp_path / "data", SPEC, [3, 5])
    export(tmp_path, fp8=fp8)
    source = open_source(tmp_path / "out")
    assert list(source.ids) == [sample.sample_id for sample in samples]
    dump = source.load("shard0-1")
    assert (dump.spec.last_hidden, dump.spec.dtype, dump.spec.layers) == ("pre", "bfloat16", SPEC.layers)
    tolerance = 0.1 if fp8 else 0
    assert torch.allclose(dump.hidden_states, samples[1].dump.hidden_states, rtol=tolerance, atol=tolerance / 10)
    assert torch.allclose(dump.last_hidden[PRE], samples[1].dump.last_hidden[PRE], rtol=tolerance, atol=tolerance / 10)
    shutil.copy(tmp_path / "out/hidden_states/hs_0.safetensors", tmp_path / "out/hidden_states/hs_1.safetensors")
    with pytest.raises(Exception, match="token_ids are not the input_ids of row 1"):
        source.load("shard0-1")
