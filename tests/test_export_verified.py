"""`verify` proves what was written, format by format; what no trainer would complain of is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from factories import make_spec
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from sglang_capture.commands.export import export
from sglang_capture.dump import Dump
from sglang_capture.export import ExportError, ExportOptions, export_dataset, exporters
from sglang_capture.export.files import FileExporter
from sglang_capture.export.final_norm import _WEIGHTS, FinalNorm
from sglang_capture.oracle import Oracle, find_final_norm
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.source import SourceError
from sglang_capture.spec import CaptureSpec
from sglang_capture.tiny_model import make_tiny_model
from sglang_capture.tiny_tokenizer import VOCAB_SIZE
from sglang_capture.verify import verify_dataset
from sglang_capture.weights import weights_digest

transformers = pytest.importorskip("transformers")

HIDDEN, LAYERS = 64, 8
FORMATS = [exporter for exporter in exporters() if isinstance(exporter, FileExporter)]
every_format = pytest.mark.parametrize("exporter", FORMATS, ids=lambda exporter: exporter.name)
WANT_POST = ["specforge", "specforge-dspark", "angelslim", "eagle", "torchspec"]

LAST = {
    "specforge": "hidden_state",
    "specforge-dspark": "target_last_hidden_states",
    "modelopt": "hidden_states",
    "angelslim": "target_hiddens",
    "eagle": "hidden_state",
    "torchspec": "hidden_states",
}
"""Where a format has the last hidden state after the norm."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path, layers=LAYERS, hidden=HIDDEN)
    return path


@pytest.fixture(scope="module")
def dumps(model: Path) -> list[Dump]:
    """Captures with both last hidden states, as a right engine makes them."""
    oracle, digest = Oracle.load(str(model)), weights_digest(str(model))
    spec = make_spec(
        layers=(2, 4, 6), last_hidden="both", hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB_SIZE,
        dtype="float32", model_path=str(model), weights_digest=digest,
    )  # fmt: skip
    found = []
    for number in range(3):
        ids = torch.randint(VOCAB_SIZE, (10 + number,), generator=torch.Generator().manual_seed(number))
        states = oracle.states(ids)
        last = {"last_hidden_state": states.post, "last_hidden_state_prenorm": states.pre}
        layers = torch.stack([states.hidden[index] for index in spec.layers], dim=1)
        found.append(Dump(f"c{number}", "", spec, ids, layers, last))
    return found


@pytest.fixture
def dataset(dumps: list[Dump], tmp_path: Path) -> Callable[..., Path]:
    """Makes a dataset of the captures with this last hidden state."""

    def make(last_hidden: str = "both", change: Callable[[Dump], Dump] = lambda dump: dump, **fields: Any) -> Path:
        spec = CaptureSpec(**{**dumps[0].spec.model_dump(), "last_hidden": last_hidden, **fields})
        held = [
            replace(dump, spec=spec, last_hidden={key: dump.last_hidden[key] for key in spec.last_hidden_keys})
            for dump in map(change, dumps)
        ]
        with DatasetWriter(tmp_path / "data", spec) as writer:
            writer.write_shard([Sample(dump.capture_id, dump) for dump in held])
        return tmp_path / "data"

    return make


def rewrite(out: Path, exporter: FileExporter, change: Callable[[str, torch.Tensor, str], torch.Tensor]) -> None:
    """Change the tensors of hidden states in every file of an export."""
    for path in out.rglob(f"data_*{exporter.suffix}"):
        content = dict(exporter.load(path))
        for name, value in content.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                content[name] = change(name, value, path.stem)
        packed = {"tensors": content, "metadata": {}} if exporter.name == "safetensors" else content
        with path.with_suffix(".new").open("wb") as sink:
            exporter.save(packed, sink)
        path.with_suffix(".new").replace(path)


@every_format
def test_what_was_written_is_proven(dataset: Callable[..., Path], tmp_path: Path, exporter: FileExporter) -> None:
    export_dataset(dataset(), exporter.name, tmp_path / "out")
    report = verify_dataset(tmp_path / "out")
    assert report.ok and report.samples == 3
    kinds = {kind.name for kind in report.kinds}
    assert ("index 4" in kinds) == (exporter.name != "eagle")
    assert ("last_hidden_state" in kinds) == (exporter.name in LAST or exporter.name == "safetensors")


@every_format
def test_rows_that_are_off_by_one_are_found(
    dataset: Callable[..., Path], tmp_path: Path, exporter: FileExporter
) -> None:
    export_dataset(dataset(), exporter.name, tmp_path / "out")

    def shift(name: str, rows: torch.Tensor, file: str) -> torch.Tensor:
        return rows.roll(1, dims=1 if rows.shape[0] == 1 else 0)

    rewrite(tmp_path / "out", exporter, shift)
    report = verify_dataset(tmp_path / "out")
    assert not report.ok
    assert all(kind.looks_like == f"{kind.name} of the token before" for kind in report.kinds)


@pytest.mark.parametrize("name", LAST)
def test_a_swapped_norm_is_found(dataset: Callable[..., Path], tmp_path: Path, dumps: list[Dump], name: str) -> None:
    (exporter,) = (exporter for exporter in FORMATS if exporter.name == name)
    export_dataset(dataset(), name, tmp_path / "out")

    def swap(key: str, rows: torch.Tensor, file: str) -> torch.Tensor:
        pre = dumps[int(file.removeprefix("data_"))].last_hidden["last_hidden_state_prenorm"]
        return pre.to(rows.dtype).reshape(rows.shape) if key == LAST[name] else rows

    rewrite(tmp_path / "out", exporter, swap)
    report = verify_dataset(tmp_path / "out")
    wrong = {kind.name: kind.looks_like for kind in report.kinds if not kind.ok}
    assert wrong == {"last_hidden_state": "last_hidden_state_prenorm"}


@pytest.mark.parametrize("last_hidden", ["pre", "post"])
def test_model_optimizers_flag_says_what_the_state_is(
    dataset: Callable[..., Path], tmp_path: Path, last_hidden: str
) -> None:
    export_dataset(dataset(last_hidden), "modelopt", tmp_path / "out")
    assert verify_dataset(tmp_path / "out").ok
    for path in (tmp_path / "out").rglob("*.pt"):
        content = torch.load(path, weights_only=True)
        torch.save({**content, "hidden_states_prenorm": not content["hidden_states_prenorm"]}, path)
    assert [kind.ok for kind in verify_dataset(tmp_path / "out").kinds] == [True, True, True, False]


@pytest.mark.parametrize("name", WANT_POST)
def test_the_models_own_norm_makes_the_state_after_it(
    dataset: Callable[..., Path], tmp_path: Path, model: Path, name: str
) -> None:
    with pytest.raises(ExportError, match=r"or name the target's directory with --model"):
        export_dataset(dataset("pre"), name, tmp_path / "out")
    summary = export_dataset(tmp_path / "data", name, tmp_path / "out", options=ExportOptions(model=str(model)))
    report = verify_dataset(tmp_path / "out")
    assert report.ok and "last_hidden_state" in {kind.name for kind in report.kinds}
    assert f"RMSNorm in float32 with model.norm.weight of {model} and eps 1e-06" in " ".join(summary.notes)


def test_a_state_after_the_norm_is_taken_as_captured_though_a_model_is_named(
    dataset: Callable[..., Path], tmp_path: Path, model: Path
) -> None:
    summary = export_dataset(dataset(), "specforge", tmp_path / "out", options=ExportOptions(model=str(model)))
    assert "RMSNorm" not in " ".join(summary.notes)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"architecture": "Gemma2ForCausalLM"}, "final norm of Gemma2ForCausalLM is not one that is known"),
        ({"architecture": "LlamaForCausalLM"}, "is a DeepseekV3ForCausalLM, and the captures are of a Llama"),
        ({"weights_digest": "0" * 32}, "are not those of the captures"),
        ({"hidden_size": 32, "weights_digest": ""}, "the captures have hidden size 32"),
    ],
)
def test_another_models_norm_is_refused(model: Path, dumps: list[Dump], fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ExportError, match=told):
        FinalNorm.load(str(model), dumps[0].spec.model_copy(update=fields))


def test_a_place_without_a_model_is_refused(tmp_path: Path, dumps: list[Dump]) -> None:
    with pytest.raises(ExportError, match="is no model's directory"):
        FinalNorm.load(str(tmp_path), dumps[0].spec)


@pytest.mark.parametrize("architecture", [name for name in _WEIGHTS if hasattr(transformers, name)])
def test_the_final_norm_is_the_one_in_transformers(architecture: str) -> None:
    config = getattr(transformers, architecture).config_class(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=16, rms_norm_eps=1e-3, moe_intermediate_size=16, pad_token_id=0,
    )  # fmt: skip
    theirs = getattr(transformers, architecture)(config)
    norm = find_final_norm(theirs)
    assert theirs.state_dict()[_WEIGHTS[architecture]].data_ptr() == norm.weight.data_ptr()
    weight, rows = torch.rand(32), torch.randn(5, 32)
    with torch.no_grad():
        norm.weight.copy_(weight)
        expected = norm(rows)
    torch.testing.assert_close(FinalNorm(weight, 1e-3, "", "")(rows), expected)


NUMBERED = {
    "speculators": {},
    "automodel-eagle3": {"seq_length": 16, "draft_vocab_size": 40},
    "automodel-dspark": {"seq_length": 16},
    "webdataset": {},
    "huggingface": {},
}
"""Formats of numbered files, with what they are made with here; some want the model beside."""


def export_numbered(data: Path, out: Path, model: Path, name: str) -> None:
    needs_model = {"model": str(model)} if "automodel" in name else {}
    export_dataset(data, name, out, options=ExportOptions(**NUMBERED[name], **needs_model))


@pytest.mark.parametrize("name", NUMBERED)
def test_numbered_files_are_proven(dataset: Callable[..., Path], tmp_path: Path, model: Path, name: str) -> None:
    export_numbered(dataset(), tmp_path / "out", model, name)
    report = verify_dataset(tmp_path / "out")
    assert report.ok and report.samples == 3 and "index 4" in {kind.name for kind in report.kinds}
    assert ("last_hidden_state_prenorm" in {kind.name for kind in report.kinds}) == ("automodel" not in name)


@pytest.mark.parametrize("name", ["speculators", "automodel-eagle3", "automodel-dspark"])
def test_numbered_files_with_rows_off_by_one_are_found(
    dataset: Callable[..., Path], tmp_path: Path, model: Path, name: str
) -> None:
    export_numbered(dataset(), tmp_path / "out", model, name)
    for path in (*(tmp_path / "out").rglob("hs_*.safetensors"), *(tmp_path / "out").glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            about, content = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        moved = {key: value.roll(1, 0 if name == "speculators" else 1) for key, value in content.items()}
        save_file({**content, **{key: moved[key] for key in content if "hidden_states" in key}}, path, about)
    report = verify_dataset(tmp_path / "out")
    assert [kind.ok for kind in report.kinds] == [False] * len(report.kinds)
    assert all(kind.looks_like == f"{kind.name} of the token before" for kind in report.kinds)


@pytest.mark.parametrize("name", ["speculators", "automodel-eagle3", "automodel-dspark", "huggingface"])
def test_an_export_that_did_not_end_cannot_be_verified(
    dataset: Callable[..., Path], tmp_path: Path, model: Path, name: str
) -> None:
    export_numbered(dataset(), tmp_path / "out", model, name)
    (tmp_path / "out" / ("manifest.json" if "automodel" in name else "state.json")).unlink()
    with pytest.raises(SourceError, match="run the export again"):
        verify_dataset(tmp_path / "out")


def test_the_targets_of_the_eagle3_cache_are_the_models_own(
    dataset: Callable[..., Path], tmp_path: Path, model: Path, dumps: list[Dump]
) -> None:
    export_numbered(dataset(), tmp_path / "out", model, "automodel-eagle3")
    chosen = torch.tensor(json.loads((tmp_path / "out/manifest.json").read_text())["selected_token_ids"])
    shard = load_file(tmp_path / "out/shard-000000.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for slot, dump in enumerate(dumps):
        with torch.no_grad():
            logits = theirs(dump.input_ids[None]).logits[0, 1:]  # of the tokens from the second one on
        rows = len(logits)
        torch.testing.assert_close(shard["target_probs"][slot, :rows], logits[:, chosen].softmax(-1), atol=1e-5, rtol=0)
        assert torch.equal(shard["position_mask"][slot, :rows, 0], torch.isin(logits.argmax(-1), chosen))


def run(dataset: Path, model: Path, *options: str) -> Result:
    app = typer.Typer()
    app.command()(export)
    arguments = [str(dataset), str(dataset.parent / "out"), "--to", "specforge", "--verify-with", str(model), *options]
    return CliRunner().invoke(app, arguments)


def test_the_command_recomputes_what_it_wrote(dataset: Callable[..., Path], model: Path) -> None:
    data = dataset()
    result = run(data, model)
    assert result.exit_code == 0 and "every kind of row is right" in result.stdout
    report = json.loads(run(data, model, "--json", "--sample", "2").stdout)["verification"]
    assert (report["ok"], report["samples"], report["model"]) == (True, 2, str(model))


def test_wrong_rows_fail_the_command_with_the_report(dataset: Callable[..., Path], model: Path) -> None:
    def shifted(dump: Dump) -> Dump:
        return replace(dump, hidden_states=dump.hidden_states.roll(1, dims=0))

    result = run(dataset(change=shifted), model)
    assert result.exit_code == 1
    assert "looks like index 2 of the token before" in " ".join(result.stdout.split())
