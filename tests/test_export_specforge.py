"""SpecForge's files, read as SpecForge reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_dataset, make_spec

from sglang_capture.dump import Dump
from sglang_capture.export import ExportError, export_dataset, get_exporter
from sglang_capture.export.files import FileExporter
from sglang_capture.export.serving import dflash_serving_note, eagle3_serving_note, sglang_eagle3_ids
from sglang_capture.shards import CaptureDataset, DatasetWriter, Sample

SPEC = make_spec()


def load_as_specforge(folder: Path, max_length: int = 1 << 20) -> list[dict[str, torch.Tensor]]:
    """The reading rule of SpecForge 0.2: every .ckpt below the folder, sorted; see docs/export.md."""
    batch = []
    for path in sorted(folder.rglob("*.ckpt")):
        raw = torch.load(path, weights_only=False, mmap=True)
        loss_mask = raw["loss_mask"][:max_length].unsqueeze(0).clone()
        loss_mask[0, -1] = 0
        batch.append(
            {
                "input_ids": raw["input_ids"][:max_length].unsqueeze(0),
                "loss_mask": loss_mask,
                "hidden_state": raw["aux_hidden_state"].squeeze(0)[:max_length].unsqueeze(0),
                "target": raw["hidden_state"].squeeze(0)[:max_length].unsqueeze(0),
            }
        )
    return batch


def test_a_sample_computed_by_hand(tmp_path: Path) -> None:
    spec = make_spec(hidden_size=2, dtype="float32")
    dump = Dump(
        capture_id="hand",
        request_id="",
        spec=spec,
        input_ids=torch.tensor([7, 8]),
        hidden_states=torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]]),
        last_hidden={"last_hidden_state": torch.tensor([[0.5, 0.25], [-1.0, -2.0]])},
    )
    with DatasetWriter(tmp_path / "data", spec) as writer:
        writer.write_shard([Sample("hand", dump, loss_mask=torch.tensor([0, 1]))])
    summary = export_dataset(tmp_path / "data", "specforge", tmp_path / "out")
    content = torch.load(tmp_path / "out/rows_0-2000/data_0.ckpt", weights_only=True)
    expected = {
        "input_ids": torch.tensor([7, 8]),
        "loss_mask": torch.tensor([0, 1]),
        "aux_hidden_state": torch.tensor(
            [[[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60]]],
            dtype=torch.bfloat16,
        ),
        "hidden_state": torch.tensor([[[0.5, 0.25], [-1, -2]]], dtype=torch.bfloat16),
    }
    assert set(content) == set(expected)
    for name, tensor in expected.items():
        assert content[name].dtype == tensor.dtype and torch.equal(content[name], tensor), name
    assert "converted from float32 to bfloat16" in " ".join(summary.notes)


def test_every_sample_is_read_back_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    samples = make_dataset(tmp_path / "data", SPEC, [3, 5], [2])
    summary = export_dataset(tmp_path / "data", "specforge", tmp_path / "out")
    batch = load_as_specforge(tmp_path / "out")
    assert summary.samples == len(batch) == len(samples)
    for got, sample in zip(batch, samples, strict=True):
        tokens = sample.dump.tokens
        assert torch.equal(got["input_ids"][0], sample.dump.input_ids)
        assert torch.equal(got["hidden_state"][0], sample.dump.hidden_states.flatten(1))
        assert torch.equal(got["target"][0], sample.dump.last_hidden["last_hidden_state"])
        assert got["loss_mask"].tolist() == [[1] * (tokens - 1) + [0]]
        assert {key: tuple(value.shape) for key, value in got.items()} == {
            "input_ids": (1, tokens),
            "loss_mask": (1, tokens),
            "hidden_state": (1, tokens, 3 * SPEC.hidden_size),
            "target": (1, tokens, SPEC.hidden_size),
        }


def test_a_file_holds_its_own_rows_and_no_others(tmp_path: Path) -> None:
    samples = make_dataset(tmp_path / "data", make_spec(hidden_size=256), [40, 1, 40])
    export_dataset(tmp_path / "data", "specforge", tmp_path / "out")
    sizes = [(tmp_path / f"out/rows_0-2000/data_{row}.ckpt").stat().st_size for row in range(3)]
    payload = [sample.dump.tokens * (16 + 4 * 256 * 2) for sample in samples]
    assert all(size - expected < 3000 for size, expected in zip(sizes, payload, strict=True))


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (0, "rows_0-2000/data_0.ckpt"),
        (1999, "rows_0-2000/data_1999.ckpt"),
        (2000, "rows_2000-4000/data_2000.ckpt"),
        (123456, "rows_122000-124000/data_123456.ckpt"),
    ],
)
def test_two_thousand_files_a_folder(row: int, name: str) -> None:
    exporter = get_exporter("specforge")
    assert isinstance(exporter, FileExporter)
    assert exporter.file_name(row) == name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": (3, 31)}, "exactly 3 layers; found 2"),
        ({"layers": (1, 2, 3, 4)}, "exactly 3 layers; found 4"),
        ({"layers": (0, 3, 31)}, "index 0 .* is the token embeddings"),
        ({"last_hidden": "pre"}, r"after the final norm \(post\).*LAST_HIDDEN=post"),
        ({"last_hidden": "none"}, "found last_hidden = none"),
    ],
)
def test_captures_it_would_train_wrongly_on_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    make_dataset(tmp_path / "data", make_spec(**changes), [2])
    with pytest.raises(ExportError, match=told):
        export_dataset(tmp_path / "data", "specforge", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_both_last_hidden_states_give_the_one_after_the_norm(tmp_path: Path) -> None:
    samples = make_dataset(tmp_path / "data", make_spec(last_hidden="both"), [4])
    export_dataset(tmp_path / "data", "specforge", tmp_path / "out")
    assert torch.equal(
        load_as_specforge(tmp_path / "out")[0]["target"][0], samples[0].dump.last_hidden["last_hidden_state"]
    )


def test_the_layers_are_told_as_specforge_counts_and_as_sglang_does(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", SPEC, [2])
    notes = export_dataset(tmp_path / "data", "specforge", tmp_path / "out").notes
    assert "outputs of layers [2, 30, 58], as SpecForge counts" in notes[0]
    assert '"eagle_aux_hidden_state_layer_ids": [3, 31, 59]' in notes[1]


def loop_indices(architecture: str, ids: list[int]) -> list[int]:
    """SGLang 0.5.23's ``set_eagle3_layers_to_capture``: models/deepseek_v2.py, and models/llama.py for most others."""
    as_given = architecture in ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM")
    return ids if as_given and ids[0] != 1 else [number + 1 for number in ids]


@pytest.mark.parametrize(
    "architecture", ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "LlamaForCausalLM"]
)
@pytest.mark.parametrize("layers", [(3, 31, 59), (2, 30, 58), (1, 30, 58)])
def test_the_ids_for_sglang_lead_back_to_the_captured_layers(architecture: str, layers: tuple[int, ...]) -> None:
    spec = make_spec(architecture=architecture, layers=layers)
    ids = sglang_eagle3_ids(spec)
    if ids is None:
        reachable = [loop_indices(architecture, [first, 30, 58]) for first in range(60)]
        assert list(layers) not in reachable
        assert "cannot be served" in eagle3_serving_note(spec)
    else:
        assert loop_indices(architecture, ids) == list(layers)
        assert str(ids) in eagle3_serving_note(spec)


@pytest.mark.parametrize(
    ("architecture", "version", "says"),
    [
        ("DeepseekV3ForCausalLM", "0.5.23", '"target_layer_ids": [2, 30, 58]'),
        ("DeepseekV3ForCausalLM", "0.5.23", "for training and for serving by SGLang"),
        ("Qwen3_5ForCausalLM", "0.5.21", "by SGLang 0.5.21 it must say [3, 31, 59]"),
        ("DeepseekV3ForCausalLM", "0.5.14", "cannot be told"),
        ("Qwen3VLForConditionalGeneration", "0.5.23", "cannot be told"),
    ],
)
def test_the_ids_of_a_dflash_draft_are_the_trainers_and_the_servers(architecture: str, version: str, says: str) -> None:
    assert says in dflash_serving_note(make_spec(architecture=architecture, sglang_version=version))


@pytest.mark.parametrize(("architecture", "version"), [("Strange", "0.5.23"), ("DeepseekV3ForCausalLM", "0.5.14")])
def test_a_rule_that_is_not_known_gives_no_ids(architecture: str, version: str) -> None:
    spec = make_spec(architecture=architecture, sglang_version=version)
    assert sglang_eagle3_ids(spec) is None
    assert "cannot be told" in eagle3_serving_note(spec)


def test_what_was_written_decodes_to_what_was_captured(tmp_path: Path) -> None:
    exporter = get_exporter("specforge")
    assert isinstance(exporter, FileExporter)
    (sample,) = make_dataset(tmp_path, make_spec(last_hidden="both"), [4])
    dump = exporter.decode(exporter.encode(CaptureDataset(tmp_path)[0]), "id", sample.dump.spec)
    assert torch.equal(dump.hidden_states, sample.dump.hidden_states)
    assert torch.equal(dump.last_hidden["last_hidden_state"], sample.dump.last_hidden["last_hidden_state"])
    assert torch.equal(dump.input_ids, sample.dump.input_ids)
    assert (dump.spec.last_hidden, dump.spec.dtype) == ("post", "bfloat16")
