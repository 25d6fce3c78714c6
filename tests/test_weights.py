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


@pytest.mark.parametrize("nothing", ["", "{}", " {} "])
def test_what_a_server_overrides_is_part_of_it(nothing):
    assert with_overrides("a", nothing) == "a"
    assert with_overrides("a", '{"rms_norm_eps": 0.1}') == with_overrides("a", '{ "rms_norm_eps":0.1 }') != "a"
