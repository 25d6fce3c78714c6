"""`sglang-capture check-draft` and `plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_dataset, make_spec
from safetensors.torch import save_file
from typer.testing import CliRunner

from sglang_capture import cli
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.export import export_dataset

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 8,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    directory = tmp_path / "draft"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 512,
        "draft_vocab_size": 512,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(8, 24)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET))
    return str(directory)


def dataset(directory: Path, **changes: Any) -> Path:
    make_dataset(directory, make_spec(**{"sglang_version": "0.5.23", **changes}), [4, 5])
    return directory


def call(*arguments: str | Path, text: bool = False) -> tuple[int, Any]:
    result = CliRunner().invoke(cli.app, [*map(str, arguments), *([] if text else ["--json"])])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout if text else json.loads(result.stdout)


def test_a_draft_that_fits(tmp_path: Path, draft: Path) -> None:
    code, report = call("check-draft", draft, dataset(tmp_path / "data"))
    assert code == 0
    assert report["fits"] is True
    assert report["fed"] == report["trained_on"] == [3, 31, 59]
    assert {finding["state"] for finding in report["findings"]} == {"same"}
    code, text = call("check-draft", draft, tmp_path / "data", text=True)
    assert code == 0
    assert "✓ the draft fits: SGLang 0.5.23 feeds it what the dataset holds" in text


def test_a_draft_that_does_not_fit(tmp_path: Path, draft: Path) -> None:
    code, text = call("check-draft", draft, dataset(tmp_path / "data", layers=(0, 3, 31)), text=True)
    assert code == 1
    assert "✗ hidden states: expected indices [0, 3, 31]; found trained on [0, 3, 31], fed [3, 31, 59]" in text
    assert "SGLANG_CAPTURE_LAYERS=3,31,59" in text
    assert "✗ the draft does not fit, served by SGLang 0.5.23: 1 different, 0 not to be told" in text


def test_a_release_that_was_not_recorded(tmp_path: Path, draft: Path) -> None:
    data = dataset(tmp_path / "data", sglang_version="")
    code, text = call("check-draft", draft, data, text=True)
    assert code == 1
    assert "! hidden states" in text
    assert call("check-draft", draft, data, "--sglang-version", "0.5.23")[0] == 0


def test_an_export_says_whose_it_is(tmp_path: Path, draft: Path) -> None:
    export_dataset(dataset(tmp_path / "data"), "specforge", tmp_path / "export")
    code, report = call("check-draft", draft, tmp_path / "export")
    assert (code, report["trainer"], report["trained_on"]) == (0, "SpecForge", [3, 31, 59])
    assert call("check-draft", draft, tmp_path / "export", "--trainer", "speculators")[0] == 1


def test_what_is_no_dataset_and_what_is_no_draft(tmp_path: Path, draft: Path, model: str) -> None:
    with pytest.raises(CaptureError, match="is no dataset"):
        call("check-draft", draft, tmp_path / "nothing")
    with pytest.raises(UsageError, match="no config of a draft"):
        call("check-draft", model, dataset(tmp_path / "data"))
    with pytest.raises(UsageError, match="give one of AngelSlim"):
        call("check-draft", draft, tmp_path / "data", "--trainer", "nobody")


def test_the_target_in_place_of_the_draft(tmp_path: Path, draft: Path, model: str) -> None:
    (Path(model) / "config.json").write_text(json.dumps({**TARGET, "num_nextn_predict_layers": 0}))
    for arguments in (("check-draft", model, dataset(tmp_path / "data")), ("plan", model, "--model", draft)):
        with pytest.raises(UsageError, match="are the arguments swapped"):
            call(*arguments)


@pytest.mark.parametrize("version", ["abc", "", "v0.5.23", "5"])
def test_what_is_no_release_number(tmp_path: Path, draft: Path, model: str, version: str) -> None:
    data = dataset(tmp_path / "data")
    for arguments in (("check-draft", draft, data), ("plan", draft, "--model", model)):
        with pytest.raises(UsageError, match="must be a release number"):
            call(*arguments, "--sglang-version", version)


def test_a_plan(draft: Path, model: str) -> None:
    code, facts = call("plan", draft, "--model", model, "--samples", "1000", "--tokens-per-sample", "20")
    assert (code, facts["problems"]) == (0, [])
    assert facts["settings"] == {"SGLANG_CAPTURE_LAYERS": "3,31,59", "SGLANG_CAPTURE_LAST_HIDDEN": "post"}
    assert (facts["trainer"], facts["export"], facts["sglang_version"]) == ("SpecForge", "specforge", "0.5.23")
    assert facts["bytes_per_token"] == 8 + 4 * 8 * 2 + 1
    assert (facts["tokens"], facts["bytes"], facts["fits"]) == (20_000, 20_000 * 73, True)


def test_a_plan_in_words(draft: Path, model: str) -> None:
    code, text = call("plan", draft, "--model", model, text=True)
    assert code == 0
    assert text.startswith("SGLANG_CAPTURE_LAYERS=3,31,59\nSGLANG_CAPTURE_LAST_HIDDEN=post\n")
    assert "--to specforge (SpecForge)" in text
    assert "as hidden-state indices (the rule: outputs if the first is 1): indices [3, 31, 59]" in text


def test_a_plan_counts_the_tokens_of_a_file(tmp_path: Path, draft: Path) -> None:
    from sglang_capture.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "tiny", layers=61, hidden=32)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in (10, 20)))
    code, facts = call("plan", draft, "--model", tmp_path / "tiny", "--file", rows)
    assert facts["tokens"] == 30
    assert code == 1
    assert [problem for problem in facts["problems"] if "the draft is for hidden size 8" in problem] == facts[
        "problems"
    ]


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({}, ["--sglang-version", "0.4.0"], "what SGLang will feed it cannot be told"),
        ({}, ["--trainer", "EAGLE"], "EAGLE makes no eagle3 drafts from captures; name a trainer with --trainer"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 31]}},
            [],
            "exactly 3 layers, and this draft is fed 2",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, [], "exactly 3 layers, and this draft is fed 0"),
        ({"target_hidden_size": 16}, [], "the draft is for hidden size 16, and this target has 8"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, [], "a layer for multi-token prediction is part of its"),
    ],
    ids=["unknown release", "no such trainer", "two layers", "no layers", "another target", "no draft to train"],
)
def test_a_plan_that_cannot_be_told_or_contradicts_itself_fails_and_says_why(
    draft: Path, model: str, config: dict[str, Any], options: list[str], told: str
) -> None:
    written = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**written, **config}))
    code, facts = call("plan", draft, "--model", model, *options)
    assert (code, len(facts["problems"]), told in facts["problems"][0]) == (1, 1, True), facts["problems"]
    code, text = call("plan", draft, "--model", model, *options, text=True)
    assert code == 1 and f"✗ {facts['problems'][0]}" in text


def test_a_disk_that_is_too_small(draft: Path, model: str) -> None:
    code, facts = call("plan", draft, "--model", model, "--samples", str(10**9), "--tokens-per-sample", "100000")
    assert (code, facts["fits"]) == (1, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--samples", "10"),
        ("--tokens-per-sample", "10"),
        ("--file", "rows.jsonl", "--samples", "10", "--tokens-per-sample", "10"),
        ("--trainer", "nobody"),
    ],
)
def test_options_of_a_plan_that_do_not_go_together(draft: Path, model: str, arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        call("plan", draft, "--model", model, *arguments)
