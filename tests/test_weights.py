import json

import pytest
import torch
from safetensors.torch import save_file

from sglang_capture.weights import weights_digest, with_overrides


@pytest.fixture
def model(tmp_path):
    save_file({"weight": torch.arange(100.0)}, tmp_path / "model.safetensors")
    write_config(tmp_path, rope_theta=10000)
    return tmp_path


def write_config(directory, **content):
    (directory / "config.json").write_text(json.dumps(content, indent=len(content)))


def test_other_numbers_of_the_same_shape_are_another_model(model):
    before = weights_digest(str(model))
    save_file({"weight": torch.arange(100.0) + 1}, model / "model.safetensors")
    assert weights_digest(str(model)) != before


def test_one_tensor_of_many_that_is_another_is_another_model(model):
    """A fine-tune may train the norms alone, a few kilobytes of a file of gigabytes."""
    tensors = {f"layers.{number}.weight": torch.zeros(50_000) for number in range(20)} | {"norm": torch.ones(64)}
    save_file(tensors, model / "model.safetensors")
    before = weights_digest(str(model))
    for name in ("norm", "layers.7.weight"):
        save_file({**tensors, name: tensors[name] + 1}, model / "model.safetensors")
        assert weights_digest(str(model)) != before


NO_SAFETENSORS = [b"", b"\x04", b"\xff" * 64, b"\x04" + bytes(7) + b"null", b"\x02" + bytes(7) + b"{}"]


@pytest.mark.parametrize("content", NO_SAFETENSORS)
def test_a_file_that_is_no_safetensors_file_is_taken_as_it_is(model, content):
    before = weights_digest(str(model))
    (model / "model.safetensors").write_bytes(content)
    assert weights_digest(str(model)) not in ("", before)


def test_the_same_weights_under_another_config_are_another_model(model):
    before = weights_digest(str(model))
    write_config(model, rope_theta=20000)
    assert weights_digest(str(model)) != before


def test_a_config_that_only_was_written_anew_is_the_same(model):
    before = weights_digest(str(model))
    write_config(model, transformers_version="5", rope_theta=10000, _name_or_path="elsewhere")
    assert weights_digest(str(model)) == before


def test_a_place_without_weights_has_no_digest(tmp_path):
    write_config(tmp_path, rope_theta=10000)
    assert weights_digest(str(tmp_path)) == weights_digest(str(tmp_path / "gone")) == ""


def test_which_of_several_files_are_loaded_is_part_of_it(model):
    save_file({"weight": torch.arange(100.0) + 1}, model / "other.safetensors")
    digests = []
    for file in ("model.safetensors", "other.safetensors"):
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": file}}))
        digests.append(weights_digest(str(model)))
    assert digests[0] != digests[1]


def test_pytorchs_own_files_are_told_apart_by_the_checksums_at_their_ends(tmp_path):
    write_config(tmp_path, rope_theta=10000)
    tensors = {f"layers.{number}": torch.zeros(100_000) for number in range(20)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    before = weights_digest(str(tmp_path))
    tensors["layers.3"][5] = 1
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert weights_digest(str(tmp_path)) not in ("", before)


def test_a_name_on_the_hub_is_looked_for_in_the_cache_that_the_server_uses(tmp_path):
    """Laid out as the Hub's own library does."""
    digests = set()
    for number, cache in enumerate((tmp_path / "one", tmp_path / "two")):
        snapshot = cache / "models--org--name/snapshots/abc"
        snapshot.mkdir(parents=True)
        (cache / "models--org--name/refs").mkdir()
        (cache / "models--org--name/refs/main").write_text("abc")
        save_file({"weight": torch.arange(100.0) + number}, snapshot / "model.safetensors")
        digests.add(weights_digest("org/name", None, str(cache)))
    assert len(digests - {""}) == 2


@pytest.mark.parametrize("nothing", ["", "{}", " {} "])
def test_what_a_server_overrides_is_part_of_it(nothing):
    assert with_overrides("a", nothing) == "a"
    assert with_overrides("a", '{"rms_norm_eps": 0.1}') == with_overrides("a", '{ "rms_norm_eps":0.1 }') != "a"
