"""Each format, on one sample that can be computed by eye: its files, keys, shapes, dtypes and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_spec
from safetensors import safe_open

from sglang_capture.dump import Dump
from sglang_capture.export import export_dataset
from sglang_capture.shards import DatasetWriter, Sample

IDS = [7, 8, 9]
MASK = [0, 1, 1]
LAYERS = [[[1, 2], [3, 4], [5, 6]], [[10, 20], [30, 40], [50, 60]], [[-1, -2], [-3, -4], [-5, -6]]]
SIDE_BY_SIDE = [[1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60], [-1, -2, -3, -4, -5, -6]]
POST = [[0.5, 0.25], [1, 2], [-1, -4]]
PRE = [[64, 32], [16, 8], [-16, -64]]


def dataset_of(path: Path, last_hidden: str = "both", mask: list[int] = MASK) -> Path:
    spec = make_spec(hidden_size=2, vocab_size=12, last_hidden=last_hidden)
    known = {"last_hidden_state": POST, "last_hidden_state_prenorm": PRE}
    dump = Dump(
        capture_id="hand",
        request_id="",
        spec=spec,
        input_ids=torch.tensor(IDS),
        hidden_states=torch.tensor(LAYERS, dtype=torch.bfloat16),
        last_hidden={key: torch.tensor(known[key], dtype=torch.bfloat16) for key in spec.last_hidden_keys},
    )
    with DatasetWriter(path, spec) as writer:
        writer.write_shard([Sample("hand", dump, loss_mask=torch.tensor(mask), metadata={"from": "hand"})])
    return path


def ids(*numbers: Any) -> torch.Tensor:
    return torch.tensor(list(numbers))


def rows(numbers: list[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.bfloat16)


PLAIN = {"input_ids": ids(7, 8, 9), "loss_mask": ids(0, 1, 1)}
BATCHED = {"input_ids": ids([7, 8, 9]), "loss_mask": ids([0, 1, 1])}

CKPT = "rows_0-2000/data_0.ckpt"
GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "specforge": (CKPT, {**PLAIN, "aux_hidden_state": rows([SIDE_BY_SIDE]), "hidden_state": rows([POST])}),
    "specforge-dflash": (CKPT, {**PLAIN, "hidden_states": rows([SIDE_BY_SIDE])}),
    "specforge-dspark": (
        CKPT,
        {**PLAIN, "hidden_states": rows([SIDE_BY_SIDE]), "target_last_hidden_states": rows([POST])},
    ),
    "modelopt": (
        "rows_0-2000/data_0.pt",
        {
            **PLAIN,
            "hidden_states": rows(POST),
            "hidden_states_prenorm": False,
            "aux_hidden_states": rows(SIDE_BY_SIDE),
            "conversation_id": "hand",
        },
    ),
    "angelslim": (CKPT, {**BATCHED, "hidden_states": rows([SIDE_BY_SIDE]), "target_hiddens": rows([POST])}),
    "angelslim-dflash": (CKPT, {**BATCHED, "hidden_states": rows([SIDE_BY_SIDE])}),
    "eagle": (f"data/{CKPT}", {**PLAIN, "hidden_state": rows(POST)}),
    "torchspec": (CKPT, {**PLAIN, "aux_hidden_states": rows([SIDE_BY_SIDE]), "hidden_states": rows([POST])}),
}


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value and type(found[name]) is type(value), name


@pytest.mark.parametrize("name", GOLDEN)
def test_a_sample_computed_by_hand(tmp_path: Path, name: str) -> None:
    file, expected = GOLDEN[name]
    summary = export_dataset(dataset_of(tmp_path / "data"), name, tmp_path / "out")
    assert (summary.samples, summary.skipped) == (1, [])
    check_same(torch.load(tmp_path / "out" / file, weights_only=True), expected)


def test_model_optimizer_is_told_of_a_state_before_the_norm(tmp_path: Path) -> None:
    summary = export_dataset(dataset_of(tmp_path / "data", "pre"), "modelopt", tmp_path / "out")
    content = torch.load(tmp_path / "out/rows_0-2000/data_0.pt", weights_only=True)
    check_same(content, {**GOLDEN["modelopt"][1], "hidden_states": rows(PRE), "hidden_states_prenorm": True})
    assert "before the final norm" in " ".join(summary.notes)


def test_nothing_but_samples_looks_like_one_to_model_optimizer(tmp_path: Path) -> None:
    export_dataset(dataset_of(tmp_path / "data"), "modelopt", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.pt")] == ["data_0.pt"]


def test_nothing_but_samples_is_in_the_folder_for_eagle(tmp_path: Path) -> None:
    summary = export_dataset(dataset_of(tmp_path / "data"), "eagle", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out/data").rglob("*") if path.is_file()] == ["data_0.ckpt"]
    assert any("data/" in note for note in summary.notes)


def test_angelslim_has_a_map_of_the_whole_vocabulary_by_default(tmp_path: Path) -> None:
    summary = export_dataset(dataset_of(tmp_path / "data"), "angelslim", tmp_path / "out")
    vocabulary = torch.load(tmp_path / "out/vocab_mapping.pt", weights_only=True)
    check_same(vocabulary, {"d2t": torch.zeros(12, dtype=torch.int64), "t2d": torch.ones(12, dtype=torch.bool)})
    assert "draft_vocab_size must be 12" in " ".join(summary.notes)


def test_a_loader_that_maps_files_by_pattern_finds_the_samples_only(tmp_path: Path) -> None:
    for name in ("specforge", "angelslim", "torchspec"):
        export_dataset(dataset_of(tmp_path / name), name, tmp_path / "out" / name)
        assert [path.name for path in (tmp_path / "out" / name).rglob("*.ckpt")] == ["data_0.ckpt"]


def test_torchspec_says_that_it_cannot_be_trained(tmp_path: Path) -> None:
    summary = export_dataset(dataset_of(tmp_path / "data"), "torchspec", tmp_path / "out")
    assert "loads, cannot be trained upstream" in summary.notes[0]


def test_safetensors_hold_the_sample_as_it_is(tmp_path: Path) -> None:
    export_dataset(dataset_of(tmp_path / "data"), "safetensors", tmp_path / "out")
    with safe_open(tmp_path / "out/rows_0-2000/data_0.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    expected = {
        "input_ids": ids(7, 8, 9),
        "loss_mask": torch.tensor(MASK, dtype=torch.uint8),
        "hidden_states": rows(LAYERS),
        "last_hidden_state": rows(POST),
        "last_hidden_state_prenorm": rows(PRE),
    }
    check_same(found, expected)
    assert metadata["sample_id"] == "hand" and json.loads(metadata["sample_metadata"]) == {"from": "hand"}
