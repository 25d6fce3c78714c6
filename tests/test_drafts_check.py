"""Whether a draft is fed what it was trained on: three failures that happened, and everything else that must fit."""

from __future__ import annotations

from typing import Any

import pytest
from factories import make_spec

from sglang_capture.drafts.check import CheckReport, check_draft
from sglang_capture.drafts.configs import draft_config
from sglang_capture.drafts.findings import Finding
from sglang_capture.drafts.plan import plan_for
from sglang_capture.errors import UsageError
from sglang_capture.layers import LayerError
from sglang_capture.spec import CaptureSpec

HIDDEN, VOCABULARY, LAYERS = 64, 512, 61
DEEPSEEK, LLAMA = "DeepseekV3ForCausalLM", "LlamaForCausalLM"


def target(**changes: Any) -> CaptureSpec:
    facts = {
        "layers": (2, 30, 58),
        "architecture": DEEPSEEK,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_layers": LAYERS,
        "last_hidden": "post",
        "sglang_version": "0.5.23",
    }
    return make_spec(**{**facts, **changes})


def eagle3(ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "num_hidden_layers": 1,
    }
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    return {**config, **changes}


def dflash(ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    nested = {"mask_token_id": 511} if ids is None else {"mask_token_id": 511, "target_layer_ids": ids}
    return {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 5,
        "num_target_layers": LAYERS,
        "block_size": 16,
        "dflash_config": nested,
        **changes,
    }


def check(
    config: dict[str, Any], spec: CaptureSpec, shapes: dict[str, tuple[int, ...]] | None = None, **options: Any
) -> CheckReport:
    return check_draft(draft_config(config, shapes), spec, **options)


def wrong(report: CheckReport) -> dict[str, Finding]:
    return {finding.what: finding for finding in report.findings if finding.state != "same"}


# The three failures that this check is for.


def test_embeddings_in_place_of_a_layer() -> None:
    """Trained on cat([embedding, 3, 31]), while the server feeds cat([3, 31, 59])."""
    report = check(eagle3([3, 31, 59]), target(layers=(0, 3, 31)))
    found = wrong(report)
    assert list(found) == ["hidden states"]
    assert report.fed == [3, 31, 59]
    assert not report.fits
    told = found["hidden states"]
    assert "trained on [0, 3, 31], fed [3, 31, 59]" in told.found
    assert "place 1: index 3 instead of the token embeddings" in told.found
    assert "the token embeddings (index 0) are only trained on" in told.found
    assert "write eagle_config.eagle_aux_hidden_state_layer_ids = [0, 3, 31]" in told.remedy
    assert "SGLANG_CAPTURE_LAYERS=3,31,59" in told.remedy


def test_embeddings_that_no_ids_can_ask_for() -> None:
    report = check(eagle3([2, 30, 58]), target(layers=(0, 3, 31), architecture=LLAMA))
    assert "no ids feed a draft the indices [0, 3, 31]" in wrong(report)["hidden states"].remedy


@pytest.mark.parametrize(
    ("architecture", "ids", "trained", "moved"),
    [
        (DEEPSEEK, [1, 29, 57], (1, 29, 57), "each is 1 too late"),
        (LLAMA, [1, 29, 57], (1, 29, 57), "each is 1 too late"),
        (LLAMA, [2, 30, 58], (2, 30, 58), "each is 1 too late"),
        (DEEPSEEK, [2, 30, 58], (3, 31, 59), "each is 1 too early"),
    ],
)
def test_ids_of_layers_against_their_outputs(
    architecture: str, ids: list[int], trained: tuple[int, ...], moved: str
) -> None:
    """1, 29, 57 against 2, 30, 58: one of them counts outputs of layers, the other what enters them."""
    report = check(eagle3(ids), target(layers=trained, architecture=architecture))
    assert list(wrong(report)) == ["hidden states"]
    assert moved in wrong(report)["hidden states"].found


@pytest.mark.parametrize(("held", "trainer", "reads"), [("pre", "SpecForge", "post"), ("post", "speculators", "pre")])
def test_before_the_norm_against_after_it(held: str, trainer: str, reads: str) -> None:
    report = check(eagle3([2, 30, 58]), target(last_hidden=held), trainer=trainer)
    told = wrong(report)
    assert list(told) == ["last hidden state"]
    assert told["last hidden state"].expected.startswith(f"{reads} ({trainer} reads it ")
    assert told["last hidden state"].found == f"{held} in the dataset"
    assert f"SGLANG_CAPTURE_LAST_HIDDEN={reads}" in told["last hidden state"].remedy
    for both in (reads, "both"):
        assert check(eagle3([2, 30, 58]), target(last_hidden=both), trainer=trainer).fits


# What fits.


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (eagle3([2, 30, 58]), {}),
        (eagle3([1, 29, 57]), {}),
        (eagle3(), {}),
        (eagle3([1, 29, 57]), {"architecture": LLAMA}),
        (eagle3([3, 31, 59]), {"layers": (3, 31, 59)}),
        (eagle3([3, 31, 60]), {"layers": (3, 31, 60)}),
        (eagle3(), {"architecture": "MiniMaxM3SparseForConditionalGeneration", "layers": (3, 31, 59)}),
        (dflash([1, 29, 57]), {}),
        (dflash([1, 15, 30, 44, 58]), {"layers": (2, 16, 31, 45, 59)}),
        (dflash(), {"layers": (2, 16, 31, 45, 59)}),
        (dflash([1], last=0), {"layers": (2,), "last_hidden": "none"}),
        (
            {"architectures": ["LlamaForCausalLMEagle"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY},
            {"layers": (1,)},
        ),
    ],
)
def test_a_draft_that_fits(config: dict[str, Any], changes: dict[str, Any]) -> None:
    report = check(config, target(**changes))
    assert wrong(report) == {}
    assert report.fits


def test_weights_that_fit() -> None:
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (100, HIDDEN),
        "d2t": (100,),
        "t2d": (VOCABULARY,),
    }
    report = check(eagle3([2, 30, 58], draft_vocab_size=100), target(), shapes)
    assert report.fits
    assert len([finding for finding in report.findings if "in the weights" in finding.what]) == 4


# What differs.


@pytest.mark.parametrize(
    ("config", "changes", "what"),
    [
        (eagle3([2, 30]), {}, "hidden states"),
        (eagle3([58, 30, 2]), {}, "order of the ids"),
        (eagle3([2, 30, 58], num_aux_hidden_states=4), {}, "width of fc in SGLang"),
        (eagle3([2, 30, 58], hidden_size=32), {}, "hidden size"),
        (eagle3([2, 30, 58], target_hidden_size=32), {}, "hidden size"),
        (eagle3([2, 30, 58], vocab_size=500, draft_vocab_size=500), {}, "vocabulary"),
        (eagle3([2, 30, 58], draft_vocab_size=513), {}, "vocabulary of the draft"),
        (eagle3([2, 30, 58], architectures=["Eagle3LlamaForCausalLM"]), {}, "class of the draft"),
        (eagle3([2, 30, 60]), {"architecture": LLAMA}, "hidden states"),
        (dflash([1, 29, 57], dflash_config={"target_layer_ids": [1, 29, 57], "mask_token_id": 512}), {}, "mask token"),
        (dflash([1, 29, 57], num_target_layers=3), {}, "layers of the target"),
        (dflash([1, 29, 61]), {}, "hidden states"),
    ],
)
def test_a_draft_that_does_not_fit(config: dict[str, Any], changes: dict[str, Any], what: str) -> None:
    report = check(config, target(**changes))
    assert what in wrong(report)
    assert all(finding.remedy for finding in wrong(report).values())
    assert not report.fits


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({"fc.weight": (HIDDEN, 2 * HIDDEN), "d2t": (100,)}, "width of fc in the weights"),
        ({"model.embed_tokens.weight": (500, HIDDEN), "d2t": (100,)}, "embeddings in the weights"),
        ({"lm_head.weight": (101, HIDDEN), "d2t": (100,)}, "lm_head.weight in the weights"),
        ({"d2t": (101,)}, "d2t in the weights"),
        ({"d2t": (100,), "t2d": (500,)}, "t2d in the weights"),
        ({"fc.weight": (HIDDEN, 3 * HIDDEN)}, "d2t in the weights"),
    ],
)
def test_weights_that_do_not_fit(shapes: dict[str, tuple[int, ...]], what: str) -> None:
    report = check(eagle3([2, 30, 58], draft_vocab_size=100), target(), shapes)
    assert list(wrong(report)) == [what]


def test_ids_that_the_server_does_not_look_at_are_named() -> None:
    """speculators writes them beside ``eagle_config``, where SGLang takes its default instead."""
    config = eagle3(None, eagle_aux_hidden_state_layer_ids=[3, 31, 59])
    report = check(config, target(layers=(3, 31, 59)))
    assert report.fed == [2, 30, 58]
    assert "names no ids where SGLang looks" in wrong(report)["hidden states"].found


def test_the_last_hidden_state_in_place_of_layers() -> None:
    config = eagle3(None, eagle_config={"use_aux_hidden_state": False})
    assert (
        "use_aux_hidden_state = false is fed the last hidden state"
        in wrong(check(config, target()))["hidden states"].found
    )


# What cannot be told is no OK.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "StrangeForCausalLM"}, "no model of SGLang 0.5.23 that is called StrangeForCausalLM"),
        ({"architecture": "DeepseekV4ForCausalLM"}, "has no set_eagle3_layers_to_capture"),
        ({"architecture": "Gemma3ForCausalLM"}, "without the residual stream"),
        ({"sglang_version": ""}, "version not recorded"),
        ({"sglang_version": "0.5.14"}, "are not known"),
        ({"sglang_version": "0.6.0"}, "are not known"),
    ],
)
def test_what_cannot_be_told(changes: dict[str, Any], reason: str) -> None:
    report = check(eagle3([2, 30, 58]), target(**changes))
    assert report.fed is None
    assert reason in wrong(report)["hidden states"].found
    assert wrong(report)["hidden states"].state == "unknown"
    assert not report.fits


def test_a_target_with_too_few_layers_for_the_default() -> None:
    report = check(eagle3(), target(num_layers=6, layers=(2, 3, 4)))
    assert "default [2, 3, 3] is no choice" in wrong(report)["hidden states"].found


def test_the_release_that_serves_may_be_another_than_the_one_that_captured() -> None:
    spec = target(architecture="Qwen3_5ForCausalLM", layers=(2, 30, 58))
    assert check(dflash([1, 29, 57]), spec).fits
    older = check(dflash([1, 29, 57]), spec, version="0.5.21")
    assert (older.fed, older.fits) == ([1, 29, 57], False)
    assert not check(dflash([1, 29, 57]), target(sglang_version="0.5.15", architecture="Qwen3_5ForCausalLM")).fits


@pytest.mark.parametrize(
    "changes", [{"architecture": "MiMoV2ForCausalLM"}, {"architecture": "Strange"}, {"sglang_version": ""}]
)
def test_a_last_hidden_state_that_may_be_another(changes: dict[str, Any]) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle"], "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    assert check(config, target()).fits
    assert wrong(check(config, target(**changes)))["hidden states"].state == "unknown"


def test_layers_for_multi_token_prediction_cannot_be_told() -> None:
    report = check({"architectures": ["DeepseekV3ForCausalLMNextN"], "hidden_size": HIDDEN}, target())
    assert wrong(report)["hidden states"].state == "unknown"


def test_a_trainer_that_makes_no_such_drafts() -> None:
    report = check(eagle3([2, 30, 58]), target(), trainer="EAGLE")
    assert wrong(report)["last hidden state"].state == "unknown"
    assert not report.fits


def test_a_model_that_is_no_draft() -> None:
    with pytest.raises(UsageError, match="no config of a draft"):
        draft_config({"architectures": [LLAMA], "num_hidden_layers": 32})
    with pytest.raises(UsageError, match=r"a target, not a draft.*are the arguments swapped"):
        draft_config({"architectures": [DEEPSEEK], "num_hidden_layers": 61, "num_nextn_predict_layers": 0})
    with pytest.raises(UsageError, match="whole numbers from 0 up"):
        draft_config(eagle3([2, -1, 58]))
    with pytest.raises(UsageError, match="hidden_size must be a whole number"):
        draft_config(eagle3(hidden_size="64"))


# From a draft to its captures.


@pytest.mark.parametrize(
    ("config", "changes", "trainer", "layers", "last", "export"),
    [
        (eagle3([1, 29, 57]), {}, None, (2, 30, 58), "post", "specforge"),
        (eagle3([2, 30, 58]), {}, None, (2, 30, 58), "post", "specforge"),
        (eagle3([2, 30, 58]), {"architecture": LLAMA}, None, (3, 31, 59), "post", "specforge"),
        (eagle3(), {}, "speculators", (2, 30, 58), "pre", "speculators"),
        (eagle3(), {}, "ModelOpt", (2, 30, 58), "post", "modelopt"),
        (dflash([1, 29, 57]), {}, None, (2, 30, 58), "none", "specforge-dflash"),
        (dflash(), {}, None, (2, 16, 31, 45, 59), "none", "specforge-dflash"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, {}, None, (1,), "post", "eagle"),
    ],
)
def test_a_plan_leads_to_captures_that_fit(
    config: dict[str, Any],
    changes: dict[str, Any],
    trainer: str | None,
    layers: tuple[int, ...],
    last: str,
    export: str,
) -> None:
    draft, spec = draft_config(config), target(**changes)
    plan = plan_for(draft, spec, version="0.5.23", trainer=trainer)
    assert (plan.spec.layers, plan.spec.last_hidden) == (layers, last)
    assert plan.trainer is not None
    assert plan.trainer.export == export
    assert plan.problems == ()
    assert check_draft(draft, plan.spec, trainer=trainer).fits


def test_a_plan_says_why() -> None:
    notes = plan_for(draft_config(eagle3([1, 29, 57])), target(), version="0.5.23").notes
    assert any("takes the ids [1, 29, 57] of a DeepseekV3ForCausalLM as outputs of layers" in note for note in notes)
    indices = plan_for(draft_config(eagle3([2, 30, 58])), target(), version="0.5.23").notes
    assert any("means indices [3, 31, 59]; what is served counts" in note for note in indices)


def test_a_plan_for_a_target_that_is_not_known_follows_the_trainer() -> None:
    plan = plan_for(draft_config(eagle3([2, 30, 58])), target(architecture="StrangeForCausalLM"), version="0.5.23")
    assert plan.spec.layers == (3, 31, 59)
    assert "these are the indices that the trainers of such drafts mean" in plan.notes[0]
    assert "what SGLang will feed it cannot be told" in plan.problems[0]


def test_a_plan_for_a_target_without_such_layers() -> None:
    with pytest.raises(LayerError, match="index 60 of a model with 60 layers is the last hidden state"):
        plan_for(draft_config(eagle3([2, 30, 59])), target(num_layers=60, architecture=LLAMA), version="0.5.23")
