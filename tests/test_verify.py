"""Verify says yes to what transformers computes, and names what is wrong with anything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_dataset, make_spec, save_dump

from sglang_capture.comparison import relative_errors
from sglang_capture.dump import Dump
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.export import export_dataset
from sglang_capture.oracle import Oracle, OracleError, find_final_norm
from sglang_capture.references import AnotherModelError, TransformersReference
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.spec import CaptureSpec
from sglang_capture.verify import VerifyError, verify_dataset, verify_dumps
from sglang_capture.verify_sources import open_source

transformers = pytest.importorskip("transformers")

HIDDEN, LAYERS, VOCABULARY = 32, 4, 64


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0)  # a weight of ones would hide a norm applied twice
    return model


@pytest.fixture(scope="module")
def oracle(model: Any) -> TransformersReference:
    return TransformersReference(Oracle(model))


@pytest.fixture(scope="module")
def model_path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path)


def spec_of(**changes: Any) -> CaptureSpec:
    fields = {"layers": (0, 1, 3), "last_hidden": "both", "hidden_size": HIDDEN, "num_layers": LAYERS}
    return make_spec(**{"dtype": "float32", "vocab_size": VOCABULARY, **fields, **changes})


def capture(model: Any, capture_id: str = "a", tokens: int = 12, **changes: Any) -> Dump:
    """A dump as a right engine would write it, from transformers itself, by another way than the oracle's."""
    spec = spec_of(**changes)
    ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(tokens))
    with torch.no_grad():
        states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
        last_layer: list[torch.Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(
            lambda _module, _args, out: last_layer.append(out if isinstance(out, torch.Tensor) else out[0])
        )
        model(input_ids=ids[None])
        hook.remove()
    last = {"last_hidden_state": states[-1][0], "last_hidden_state_prenorm": last_layer[0][0]}
    return Dump(
        capture_id=capture_id,
        request_id="",
        spec=spec,
        input_ids=ids,
        hidden_states=torch.stack([states[index][0] for index in spec.layers], dim=1).to(spec.torch_dtype),
        last_hidden={key: last[key].to(spec.torch_dtype) for key in spec.last_hidden_keys},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_captures_pass(model: Any, oracle: TransformersReference, dtype: str) -> None:
    report = verify_dumps([capture(model, tokens=tokens, dtype=dtype) for tokens in (1, 12, 80)], oracle)
    assert report.ok and report.samples == 3 and report.tokens == 93 and report.dtype == dtype
    assert [kind.name for kind in report.kinds] == [
        "index 0",
        "index 1",
        "index 3",
        "last_hidden_state",
        "last_hidden_state_prenorm",
    ]
    if dtype == "float32":
        assert report.worst_error <= 1e-5 and report.kinds[0].worst_error == 0


def shift(rows: torch.Tensor) -> torch.Tensor:
    return rows.roll(1, dims=0)


def swap_norms(dump: Dump) -> Dump:
    post, pre = dump.last_hidden["last_hidden_state"], dump.last_hidden["last_hidden_state_prenorm"]
    return replace(dump, last_hidden={"last_hidden_state": pre, "last_hidden_state_prenorm": post})


FAULTS: dict[str, tuple[Callable[[Dump], Dump], dict[str, str]]] = {
    "shifted": (
        lambda dump: replace(dump, hidden_states=shift(dump.hidden_states)),
        {f"index {index}": f"index {index} of the token before" for index in (0, 1, 3)},
    ),
    "last shifted": (
        lambda dump: replace(dump, last_hidden={key: rows.roll(-1, 0) for key, rows in dump.last_hidden.items()}),
        {key: f"{key} of the token after" for key in ("last_hidden_state", "last_hidden_state_prenorm")},
    ),
    "norms swapped": (
        swap_norms,
        {"last_hidden_state": "last_hidden_state_prenorm", "last_hidden_state_prenorm": "last_hidden_state"},
    ),
    "layers reversed": (
        lambda dump: replace(dump, hidden_states=dump.hidden_states.flip(1)),
        {"index 0": "index 3", "index 3": "index 0"},
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_all_rows_is_named(model: Any, oracle: TransformersReference, fault: str, dtype: str) -> None:
    damage, expected = FAULTS[fault]
    report = verify_dumps(
        [capture(model, tokens=40, dtype=dtype), damage(capture(model, "bad", 40, dtype=dtype))], oracle
    )
    assert not report.ok
    assert {kind.name: kind.looks_like for kind in report.kinds if not kind.ok} == expected
    assert {kind.sample_id for kind in report.kinds if not kind.ok} == {"bad"}


def test_another_layer_than_the_spec_says_is_named(model: Any, oracle: TransformersReference) -> None:
    dump = replace(capture(model, layers=(1, 3)), spec=spec_of(layers=(2, 3)))
    (wrong,) = [kind for kind in verify_dumps([dump], oracle).kinds if not kind.ok]
    assert (wrong.name, wrong.looks_like) == ("index 2", "index 1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", ["of another token", "nan", "inf"])
def test_one_wrong_row_is_found_and_placed(model: Any, oracle: TransformersReference, dtype: str, value: str) -> None:
    dump = capture(model, "bad", 40, dtype=dtype)
    other = capture(model, "other", 60, dtype=dtype).hidden_states[50, 1]
    dump.hidden_states[17, 1] = other if value == "of another token" else float(value)
    report = verify_dumps([capture(model, tokens=20, dtype=dtype), dump], oracle)
    assert [(kind.name, kind.sample_id, kind.row) for kind in report.kinds if not kind.ok] == [("index 1", "bad", 17)]


def test_a_report_with_an_infinite_error_is_json(model: Any, oracle: TransformersReference) -> None:
    dump = capture(model)
    dump.hidden_states[:, 1] = float("nan")
    report = verify_dumps([dump], oracle)
    content = json.loads(json.dumps(report.model_dump(mode="json"), allow_nan=False))
    assert content["worst_error"] == content["kinds"][1]["middle_error"] == "Infinity"
    assert type(report).model_validate(content) == report


def test_an_embedding_off_by_one_bit_is_not_exact(model: Any, oracle: TransformersReference) -> None:
    dump = capture(model)
    dump.hidden_states[3, 0, 5] *= 1 + 1e-6
    assert [kind.name for kind in verify_dumps([dump], oracle).kinds if not kind.ok] == ["index 0"]


def test_a_tolerance_of_ones_own_holds_for_every_row(model: Any, oracle: TransformersReference) -> None:
    dumps = [capture(model, dtype="bfloat16")]
    assert verify_dumps(dumps, oracle, tolerance=0.01).ok
    assert not verify_dumps(dumps, oracle, tolerance=1e-4).ok


def test_repeated_tokens_are_not_taken_for_a_shift(model: Any, oracle: TransformersReference) -> None:
    ids = torch.full((30,), 5)
    with torch.no_grad():
        states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    spec = spec_of(last_hidden="none", dtype="bfloat16")
    rows = torch.stack([states[index][0] for index in spec.layers], dim=1).to(torch.bfloat16)
    assert verify_dumps([Dump("a", "", spec, ids, rows, {})], oracle).ok


def test_errors_are_relative_to_what_was_expected() -> None:
    found = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [float("nan"), 0.0]])
    expected = torch.tensor([[3.0, 3.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert relative_errors(found, expected).tolist() == pytest.approx([1 / 18**0.5, 0.0, float("inf"), float("inf")])


@pytest.fixture
def dataset(tmp_path: Path, model: Any, model_path: str) -> Path:
    samples = [
        Sample(f"s{tokens}", capture(model, f"s{tokens}", tokens, layers=(1, 2, 3), model_path=model_path))
        for tokens in (4, 5, 6, 7)
    ]
    with DatasetWriter(tmp_path / "data", samples[0].dump.spec) as writer:
        writer.write_shard(samples)
    return tmp_path / "data"


def test_a_dataset_is_verified_with_the_model_it_names(dataset: Path, model_path: str) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_dataset(dataset, sample=3, progress=lambda done, total: seen.append((done, total)))
    assert report.ok and report.samples == 3 and report.model == model_path
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert verify_dataset(dataset, sample=99).samples == 4


def test_the_same_seed_takes_the_same_captures(dataset: Path) -> None:
    tokens = [{verify_dataset(dataset, sample=1, seed=seed).tokens for _ in range(2)} for seed in range(5)]
    assert all(len(found) == 1 for found in tokens)
    assert len(set.union(*tokens)) > 1


def test_an_export_is_verified_as_the_trainer_will_read_it(dataset: Path, tmp_path: Path) -> None:
    export_dataset(dataset, "specforge", tmp_path / "out")
    report = verify_dataset(tmp_path / "out")
    assert report.ok and report.samples == 4 and report.dtype == "bfloat16"
    for path in (tmp_path / "out").rglob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        content["aux_hidden_state"] = content["aux_hidden_state"].roll(1, dims=1)
        torch.save(content, path)
    wrong = [kind.looks_like for kind in verify_dataset(tmp_path / "out").kinds if not kind.ok]
    assert wrong == [f"index {index} of the token before" for index in (1, 2, 3)]


def test_a_spool_and_a_single_dump_are_verified(tmp_path: Path, model: Any, model_path: str) -> None:
    paths = [save_dump(tmp_path, capture(model, name, 6, model_path=model_path)) for name in ("a", "b")]
    assert verify_dataset(tmp_path).samples == 2
    assert verify_dataset(paths[0]).samples == 1


def test_a_damaged_dump_is_named(tmp_path: Path, model: Any, model_path: str) -> None:
    path = save_dump(tmp_path, capture(model, "a", 6, model_path=model_path))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CaptureError, match=r"a\.pt is no readable dump"):
        verify_dataset(tmp_path)


@pytest.mark.parametrize("name", ["empty", "absent", "absent.pt"])
def test_a_place_without_captures_says_what_was_expected(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError, match=r"holds no captures: expected a dataset|is gone"):
        verify_dataset(tmp_path / name)


def test_an_empty_dataset_has_nothing_to_verify(tmp_path: Path) -> None:
    make_dataset(tmp_path, spec_of())
    with pytest.raises(VerifyError, match="nothing to verify"):
        verify_dataset(tmp_path)


def test_a_model_of_another_depth_is_refused(model: Any, oracle: TransformersReference) -> None:
    dump = replace(capture(model), spec=spec_of(num_layers=5))
    with pytest.raises(AnotherModelError, match="5 layers of hidden size 32, and the model to compare with has 4"):
        verify_dumps([dump], oracle)


def test_ids_outside_the_vocabulary_are_refused(model: Any, oracle: TransformersReference) -> None:
    dump = capture(model)
    dump.input_ids[2] = VOCABULARY
    with pytest.raises(OracleError, match="token id 64 is outside the model's vocabulary of 64"):
        verify_dumps([dump], oracle)


def test_a_model_that_cannot_be_loaded_is_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no directory .*no-model; --model takes"):
        verify_dataset(dataset, model=str(tmp_path / "no-model"))
    (tmp_path / "no-model").mkdir()
    with pytest.raises(OracleError, match=r"cannot load .*name its directory"):
        verify_dataset(dataset, model=str(tmp_path / "no-model"))


def test_captures_with_images_are_passed_by(model: Any) -> None:
    """Their pixels are not in a dump, so nothing could be said of them but a false alarm."""
    plain, seeing = capture(model, "plain", tokens=9), capture(model, "seeing", tokens=11)
    absent = next(token for token in range(VOCABULARY) if token not in plain.input_ids)
    seeing.input_ids[3] = absent
    model.config.media_placeholder_token_id = absent
    try:
        oracle = TransformersReference(Oracle(model))
        report = verify_dumps([seeing, plain], oracle)
        assert (report.ok, report.samples, report.with_media) == (True, 1, 1)
        with pytest.raises(VerifyError, match="all 1 captures taken are passed by: 1 made with images"):
            verify_dumps([seeing], oracle)
    finally:
        del model.config.media_placeholder_token_id


def test_captures_labelled_with_nan_are_passed_by(tmp_path: Path, model: Any, oracle: TransformersReference) -> None:
    right, bad = (replace(capture(model, name, 9), spec=spec_of(model_path="m")) for name in ("right", "bad"))
    bad.hidden_states[2] = float("nan")
    samples = [Sample("right", right), Sample("bad", replace(bad, nonfinite_rows=1))]
    with DatasetWriter(tmp_path, right.spec) as writer:
        writer.write_shard(samples)
    source = open_source(tmp_path)
    report = verify_dumps(map(source.load, source.ids), oracle)
    assert (report.ok, report.samples, report.labelled) == (True, 1, 1)
    with pytest.raises(VerifyError, match="all 1 captures taken are passed by: 1 labelled to have NaN"):
        verify_dumps([source.load("bad")], oracle)


def test_a_model_that_gives_nan_itself_is_said_to(model: Any) -> None:
    right = capture(model, tokens=9)
    absent = next(token for token in range(VOCABULARY) if token not in right.input_ids)
    touched = replace(right, capture_id="touched", input_ids=right.input_ids.clone())
    touched.input_ids[3] = absent
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[absent] = float("nan")
    reference = TransformersReference(Oracle(broken), "the model")
    report = verify_dumps([right, touched], reference)
    assert (report.ok, report.samples, report.reference_nonfinite) == (True, 1, 1)
    with pytest.raises(VerifyError, match="1 such that the model itself gives NaN or Inf in float32"):
        verify_dumps([touched], reference)


def test_the_final_norm_is_found_in_other_families() -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9))
    assert find_final_norm(gpt2) is gpt2.transformer.ln_f
