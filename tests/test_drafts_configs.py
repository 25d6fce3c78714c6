"""Configs of drafts as each trainer writes them, what SGLang's own source reads of them, and shapes of weights."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_spec
from safetensors.torch import save_file
from test_contract import VERSIONS, source_of

from sglang_capture.drafts.configs import draft_config, spread_ids
from sglang_capture.drafts.releases import holds
from sglang_capture.drafts.served import CLASSES, USUAL_CLASS, served
from sglang_capture.drafts.shapes import read_shapes
from sglang_capture.drafts.trainers import TRAINERS, Trainer, trainer_of
from sglang_capture.errors import UsageError
from sglang_capture.export import get_exporter
from sglang_capture.export.options import ExportOptions

IDS = [1, 29, 57]
OUTPUTS = (2, 30, 58)


def released_file(version: str, *names: str) -> str:
    """The first of these files that a release has."""
    root = source_of(version) / "sglang/srt"
    return next(path for name in names if (path := root / name).is_file()).read_text()


@pytest.mark.parametrize(
    ("config", "kind", "trainer", "meant", "field"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS}},
            *("eagle3", "", OUTPUTS, "eagle_config.eagle_aux_hidden_state_layer_ids"),
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", "", OUTPUTS, ""),
        (
            {
                "architectures": ["DFlashDraftModel"],
                "num_target_layers": 61,
                "dflash_config": {"target_layer_ids": IDS},
            },
            *("dflash", "", OUTPUTS, "dflash_config.target_layer_ids"),
        ),
        (
            {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61],
                "transformer_layer_config": {"hidden_size": 8, "vocab_size": 512, "num_hidden_layers": 1},
            },
            *("eagle3", "speculators", OUTPUTS, "eagle_aux_hidden_state_layer_ids"),
        ),
        (
            {
                "architectures": ["DFlashDraftModel"],
                "speculators_model_type": "dflash",
                "aux_hidden_state_layer_ids": [2, 30, 58],
                "transformer_layer_config": {"num_hidden_layers": 5},
            },
            *("dflash", "speculators", OUTPUTS, "aux_hidden_state_layer_ids"),
        ),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3", "AngelSlim", OUTPUTS, ""),
        (
            {"architectures": ["QwenDFlashDraftModel"], "dflash_config": {"target_layer_ids": IDS}},
            *("dflash", "AngelSlim", OUTPUTS, "dflash_config.target_layer_ids"),
        ),
        (
            {
                "architectures": ["DFlashDraftModel"],
                "target_layer_ids": IDS,
                "num_target_layers": 3,
                "target_num_hidden_layers": 61,
            },
            *("dflash", "TorchSpec", OUTPUTS, "target_layer_ids"),
        ),
        ({"architectures": ["LlamaEagle3DraftModel"]}, "eagle3", "NeMo Automodel", OUTPUTS, ""),
        (
            {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": IDS, "num_target_layers": 61},
            *("dspark", "", OUTPUTS, "target_layer_ids"),
        ),
        (
            {"architectures": ["DSparkDraftModel"], "dspark_target_layer_ids": IDS, "target_layer_ids": [7]},
            *("dspark", "", OUTPUTS, "dspark_target_layer_ids"),
        ),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "eagle", "EAGLE", None, ""),
        ({"eagle_config": {}, "draft_vocab_size": 8}, "eagle3", "", OUTPUTS, ""),
    ],
)
def test_a_trainers_config(
    config: dict[str, Any], kind: str, trainer: str, meant: tuple[int, ...] | None, field: str
) -> None:
    draft = draft_config(config)
    assert (draft.kind, draft.trainer, draft.ids_field) == (kind, trainer, field)
    assert draft.meant(61) == meant
    reader = trainer_of(draft)
    if (trainer, kind) == ("TorchSpec", "dflash"):
        assert reader is None  # it trains such drafts beside a running server, on no captures
        return
    assert reader is not None
    assert reader.kind == kind
    assert not trainer or reader.name == trainer


def test_the_layers_of_the_target_have_another_name_for_torchspec() -> None:
    config = {"architectures": ["DFlashDraftModel"], "num_target_layers": 5}
    assert draft_config(config).target_layers == 5
    assert draft_config({**config, "target_num_hidden_layers": 61}).target_layers == 61


def test_a_kind_of_speculators_that_is_not_known() -> None:
    with pytest.raises(UsageError, match="type 'mlp' is not known"):
        draft_config({"speculators_model_type": "mlp"})


def test_a_draft_of_speculators_has_no_class_that_sglang_loads() -> None:
    assert "Eagle3DraftModel" not in CLASSES


# What SGLang's source says of the same.


def test_the_usual_classes_are_of_their_kind() -> None:
    for kind, name in USUAL_CLASS.items():
        assert draft_config({"architectures": [name]}).kind == kind
        assert name in CLASSES


@pytest.mark.parametrize("version", VERSIONS)
def test_evenly_spread_ids_are_those_of_a_release(version: str) -> None:
    module = ast.parse(released_file(version, "speculative/dflash_utils.py"))
    function = next(
        node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "build_target_layer_ids"
    )
    names: dict[str, Any] = {"List": list}
    exec(compile(ast.Module([function], []), "build_target_layer_ids", "exec"), names)
    for target in (4, 5, 28, 36, 61, 64):
        for draft in range(1, 9):
            assert list(spread_ids(target, draft)) == names["build_target_layer_ids"](target, draft)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_looks_for_the_ids_of_eagle3_in_eagle_config_alone(version: str) -> None:
    source = ast.unparse(
        ast.parse(
            released_file(
                version,
                "model_executor/model_runner_components/spec_aux_hidden_state.py",
                "model_executor/model_runner.py",
            )
        )
    )
    assert "eagle_config.get('use_aux_hidden_state', True)" in source
    assert "eagle_aux_hidden_state_layer_ids = eagle_config['eagle_aux_hidden_state_layer_ids']" in source
    assert "eagle_aux_hidden_state_layer_ids = None" in source


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_builds_fc_for_as_many_hidden_states(version: str) -> None:
    source = ast.unparse(ast.parse(released_file(version, "models/llama_eagle3.py")))
    assert "self.num_aux_hidden_states = getattr(config, 'num_aux_hidden_states', None)" in source
    assert "self.num_aux_hidden_states = len(layer_ids) if layer_ids else 3" in source


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_looks_for_the_ids_of_dflash_in_two_places(version: str) -> None:
    source = ast.unparse(ast.parse(released_file(version, "speculative/dflash_utils.py")))
    assert "dflash_cfg.get('target_layer_ids', _cfg_get(draft_hf_config, 'target_layer_ids', None))" in source


@pytest.mark.parametrize("version", [version for version in VERSIONS if holds(version, "0.5.16")])
def test_a_release_prefers_the_prefixed_ids_of_dspark(version: str) -> None:
    source = ast.unparse(ast.parse(released_file(version, "speculative/dspark_components/dspark_config.py")))
    assert "prefixed_target_layer_ids = _cfg_get(draft_hf_config, 'dspark_target_layer_ids', None)" in source
    assert "target_layer_ids = base.target_layer_ids" in source


@pytest.mark.parametrize("version", [version for version in VERSIONS if holds(version, "0.5.18")])
def test_a_release_adds_1_to_the_ids_of_two_drafts_of_muse_glimmer(version: str) -> None:
    source = released_file(version, "model_executor/model_runner_components/spec_aux_hidden_state.py")
    for name, since in (("MuseGlimmerAssistantModel", "0.5.18"), ("DFlash2DraftModel", "0.5.19")):
        assert (f'"{name}"' in source) == holds(version, since)
        if holds(version, since):
            draft = draft_config({"architectures": [name], "target_layer_ids": [1, 9]})
            assert served(draft, "MuseGlimmerForCausalLM", 20, version).indices == (2, 10)
    plain = draft_config({"architectures": ["DFlashDraftModel"], "target_layer_ids": [1, 9]})
    assert served(plain, "MuseGlimmerForCausalLM", 20, version).indices == (1, 9)


def test_ids_that_must_ascend() -> None:
    draft = draft_config({"architectures": ["DFlashDraftModel"], "target_layer_ids": [9, 1]})
    assert served(draft, "LlamaForCausalLM", 20, "0.5.23").indices == (2, 10)
    assert "wants ascending ids" in served(draft, "BeamForCausalLM", 20, "0.5.23").unknown


# Weights.


def test_shapes_are_read_of_all_files_without_their_tensors(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(4, 12)}, tmp_path / "a.safetensors")
    save_file({"model.d2t": torch.zeros(7, dtype=torch.int64)}, tmp_path / "b.safetensors")
    shapes = read_shapes(tmp_path)
    assert shapes == {"fc.weight": (4, 12), "model.d2t": (7,)}
    draft = draft_config({"architectures": ["LlamaForCausalLMEagle3"]}, shapes)
    assert (draft.shape("fc.weight"), draft.shape("d2t"), draft.shape("t2d")) == ((4, 12), (7,), None)


def test_a_broken_weights_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read"):
        read_shapes(tmp_path)


# Exports.

CACHE = ExportOptions(model="/models/tiny", seq_length=8)
OPTIONS = {"automodel-dspark": CACHE, "automodel-eagle3": CACHE.model_copy(update={"draft_vocab_size": 4})}
"""Exports that are not made without options."""


@pytest.mark.parametrize("row", TRAINERS, ids=lambda row: f"{row.name} {row.kind}")
def test_the_export_of_a_trainer_takes_what_a_plan_captures_for_it(row: Trainer) -> None:
    last = {"none": "none", "post": "post", "pre": "pre", "either": "post"}[row.needs]
    get_exporter(row.export).check(
        make_spec(layers=(2, 30, 58), last_hidden=last), OPTIONS.get(row.export, ExportOptions())
    )
