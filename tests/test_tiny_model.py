"""The tiny model: the same bytes each time, loadable by transformers, its chat template usable for training."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sglang_capture.tiny_model import MARKER, TinyModelError, make_tiny_model

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße?"},
    {"role": "assistant", "content": "世界 🎉"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_model(directory, layers=3)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model_dir)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(next(directory.glob("*.safetensors")))


def test_same_arguments_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    torch.rand(3)  # the global generator plays no part
    make_tiny_model(tmp_path / "again", layers=3)
    assert digests(tmp_path / "again") == digests(model_dir)


def test_another_seed_changes_the_weights_only(model_dir: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, layers=3, seed=1)
    before, after = digests(model_dir), digests(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {MARKER, "model-00001-of-00001.safetensors"}


def test_a_model_that_is_there_is_used_again(model_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    make_tiny_model(model_dir, layers=3)
    assert {path: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before


def test_refuses_a_directory_with_something_else(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(TinyModelError, match="not empty and holds no tiny model"):
        make_tiny_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(TinyModelError, match="made with other arguments"):
        make_tiny_model(model_dir, layers=4)
    with pytest.raises(TinyModelError, match="is a file"):
        make_tiny_model(tmp_path / "precious.txt")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers must be 1 or more, not 0"),
        ({"hidden": 100}, "hidden must be a multiple of 16"),
        ({"hidden": 0}, "hidden must be a multiple of 16"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path / "model", **wrong)
    assert not (tmp_path / "model").exists()


def test_index_names_every_tensor(model_dir: Path) -> None:
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    tensors = weights(model_dir)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert all((model_dir / name).is_file() for name in index["weight_map"].values())


def test_no_norm_is_the_identity(model_dir: Path) -> None:
    norms = {name: tensor for name, tensor in weights(model_dir).items() if "norm" in name}
    assert len(norms) == 3 * 4 + 1
    for name, tensor in norms.items():
        assert tensor.std() > 0.05, name
        assert tensor.min() > 0.5, name


def test_dtype_is_what_was_asked_for(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, layers=2, dtype="bfloat16")
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("layers", "hidden"), [(1, 32), (2, 128), (3, 48)])
def test_transformers_loads_every_weight(tmp_path: Path, layers: int, hidden: int) -> None:
    transformers = pytest.importorskip("transformers")
    make_tiny_model(tmp_path, layers=layers, hidden=hidden)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        out = model(torch.arange(20)[None], output_hidden_states=True)
    assert len(out.hidden_states) == layers + 1
    assert out.hidden_states[-1].shape == (1, 20, hidden)
    assert torch.isfinite(out.logits).all()


def test_each_layer_changes_the_stream(model_dir: Path) -> None:
    """Else a capture of the wrong layer could pass for the right one."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.arange(6, 200)[None], output_hidden_states=True).hidden_states
    for before, after in pairwise(states):
        assert ((after - before).norm(dim=-1) / before.norm(dim=-1)).min() > 0.03


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert all(0 <= number < 512 for number in ids)
    assert tokenizer.decode(ids) == text


def test_the_vocabulary_is_full(tokenizer: Any, model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config["bos_token_id"], config["eos_token_id"])


def test_text_starts_with_bos_as_deepseeks_does(tokenizer: Any) -> None:
    assert tokenizer("x").input_ids == [tokenizer.bos_token_id, *tokenizer.encode("x", add_special_tokens=False)]


def test_the_mask_marks_what_the_assistant_said(tokenizer: Any) -> None:
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(out["input_ids"], out["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == "世界 🎉<|eos|>No.<|eos|>"
    assert out["input_ids"].count(tokenizer.bos_token_id) == 1


def test_the_generation_prompt_opens_an_answer(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|><|system|>Be brief.<|user|>Grüße?<|assistant|>"


def test_an_unknown_role_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="role must be system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
