"""Whether SGLang can load a draft, and runs the norms it was trained with; what the releases' source says of both."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from factories import make_spec
from test_contract import VERSIONS, source_of

from sglang_capture.drafts.check import check_draft
from sglang_capture.drafts.configs import draft_config
from sglang_capture.drafts.findings import Finding
from sglang_capture.drafts.loading import SIZES
from sglang_capture.drafts.norms import NORM_BEFORE_FC_SINCE
from sglang_capture.drafts.plan import plan_for
from sglang_capture.drafts.releases import holds

DECODER = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}
EAGLE3 = {
    **DECODER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 512,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    "draft_vocab_size": 512,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "transformer_layer_config": DECODER,
}
"""As speculators 0.9.0 writes it, without what no loader reads, and with one norm off that it has on by default."""


def wrong(config: dict[str, Any], version: str = "0.5.23") -> dict[str, Finding]:
    spec = make_spec(
        layers=(2, 30, 58),
        architecture="DeepseekV3ForCausalLM",
        hidden_size=64,
        vocab_size=512,
        num_layers=61,
        last_hidden="both",
        sglang_version=version,
    )
    report = check_draft(draft_config(config), spec)
    return {finding.what: finding for finding in report.findings if finding.state != "same"}


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**EAGLE3, **changes}.items() if name not in names}


# Loading.


@pytest.mark.parametrize(
    "config",
    [
        EAGLE3,
        without(draft_vocab_size=None),
        without("draft_vocab_size", tie_word_embeddings=True),
        without(target_hidden_size=64),
        without("draft_vocab_size", architectures=["Eagle3DeepseekV2ForCausalLM"], target_hidden_size=None),
    ],
)
def test_a_draft_that_loads(config: dict[str, Any]) -> None:
    assert wrong(config) == {}


@pytest.mark.parametrize("name", ["model_type", "draft_vocab_size", *SIZES])
def test_a_field_that_sglang_reads_and_the_config_lacks(name: str) -> None:
    found = wrong(without(name))
    assert list(found) == [f"{name} in the config"]
    assert found[f"{name} in the config"].found == "nothing"
    assert found[f"{name} in the config"].remedy


def test_a_size_of_the_target_that_is_null() -> None:
    found = wrong(without(target_hidden_size=None))
    assert list(found) == ["target_hidden_size in the config"]
    assert "TypeError" in found["target_hidden_size in the config"].expected
    assert "remove it" in found["target_hidden_size in the config"].remedy


def test_a_config_as_speculators_writes_it_is_one_finding_with_every_step() -> None:
    found = wrong(SPECULATORS)
    assert list(found) == ["a config that SGLang can load"]
    told = found["a config that SGLang can load"]
    assert "SGLang does not read it as written" in told.found
    for step in (
        '(1) "architectures": ["LlamaForCausalLMEagle3"]',
        "(2) every field of transformer_layer_config at the top",
        "(3) no target_hidden_size",
        "(4) eagle_config.eagle_aux_hidden_state_layer_ids = [1, 29, 57]",
    ):
        assert step in told.remedy


def test_the_steps_lead_to_a_config_that_loads() -> None:
    config = {**SPECULATORS, **DECODER, "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}
    del config["target_hidden_size"]
    assert wrong(config) == {}


def test_a_class_alone_does_not_make_it_load() -> None:
    """What was done by the advice on the class, and ended in 'Unrecognized model'."""
    assert "a config that SGLang can load" in wrong({**SPECULATORS, "architectures": ["LlamaForCausalLMEagle3"]})


# Norms.


def test_a_residual_after_the_norm() -> None:
    found = wrong(without(norm_before_residual=True))
    assert list(found) == ["norm_before_residual"]
    assert "train with norm_before_residual off for SGLang" in found["norm_before_residual"].remedy
    assert wrong(without(norm_before_residual=False)) == {}


def test_a_residual_of_which_speculators_says_nothing() -> None:
    config = {name: value for name, value in SPECULATORS.items() if name != "norm_before_residual"}
    assert wrong(config)["norm_before_residual"].state == "unknown"


@pytest.mark.parametrize(
    ("changes", "version", "what"),
    [
        ({"norm_before_fc": True}, "0.5.17", None),
        ({"norm_before_fc": True}, "0.5.16", "norm_before_fc"),
        ({"norm_before_fc": True, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "0.5.23", "norm_before_fc"),
        ({"fc_norm": True, "norm_output": True}, "0.5.15", None),
        ({"fc_norm": True, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "0.5.15", None),
        ({"fc_norm": False, "norm_output": False, "norm_before_fc": False}, "0.5.15", None),
    ],
)
def test_a_norm_that_a_release_reads_or_passes_by(changes: dict[str, Any], version: str, what: str | None) -> None:
    assert list(wrong(without(**changes), version)) == ([what] if what else [])


@pytest.mark.parametrize(
    ("name", "what"), [("norm_before_fc", None), ("fc_norm", "fc_norm"), ("norm_output", "norm_output")]
)
def test_a_norm_inside_eagle_config(name: str, what: str | None) -> None:
    inner = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], name: True}
    assert list(wrong(without(eagle_config=inner))) == ([what] if what else [])


# What SGLang's source says of the same.


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_reads_these_fields_of_eagle3(version: str) -> None:
    models = source_of(version) / "sglang/srt/models"
    llama, mla = (
        ast.unparse(ast.parse((models / name).read_text())) for name in ("llama_eagle3.py", "kimi_k25_eagle3.py")
    )
    assert "if hasattr(config, 'target_hidden_size'):\n" in llama
    assert "self.hidden_size_in = config.target_hidden_size\n" in llama
    assert "if config.draft_vocab_size is None:" in llama
    assert "getattr(config, 'target_hidden_size', None) or config.hidden_size" in mla
    assert "getattr(config, 'draft_vocab_size', None)" in mla
    before_fc = "eagle_config.get('norm_before_fc', getattr(config, 'norm_before_fc', False))"
    assert (before_fc in llama) == holds(version, NORM_BEFORE_FC_SINCE)
    assert "norm_before_fc" not in mla
    for source in (llama, mla):
        assert "getattr(config, 'fc_norm', None)" in source
        assert "self.norm_output = getattr(config, 'norm_output', False)" in source


@pytest.mark.parametrize("version", VERSIONS)
def test_no_release_has_a_residual_after_the_norm(version: str) -> None:
    for path in (source_of(version) / "sglang/srt").rglob("*.py"):
        text = path.read_bytes()
        assert b"norm_before_residual" not in text
        assert b"transformer_layer_config" not in text


def test_a_plan_says_what_keeps_sglang_from_loading_the_draft() -> None:
    """Before anything is captured, not after weeks of training."""
    target = make_spec(architecture="DeepseekV3ForCausalLM", hidden_size=64, vocab_size=512)
    notes = plan_for(draft_config(SPECULATORS), target, version="0.5.23").notes
    assert any("does not load it as it is" in note and "transformer_layer_config at the top" in note for note in notes)
    assert not any("does not load" in note for note in plan_for(draft_config(EAGLE3), target, version="0.5.23").notes)
