"""The command `verify`: what it prints where, and its exit codes. The oracle itself is in test_verify.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from factories import make_dataset, make_spec
from typer.testing import CliRunner, Result

from sglang_capture.commands.verify import verify
from sglang_capture.oracle import Oracle, States
from sglang_capture.shards import CaptureDataset, DatasetError

SPEC = make_spec(last_hidden="both", num_layers=5, layers=(1, 2, 3))


class KnownStates:
    """An oracle that knows the rows of one dataset."""

    num_layers, hidden_size, dtype = SPEC.num_layers, SPEC.hidden_size, "bfloat16"

    def __init__(self, dataset: Path) -> None:
        self._samples = {tuple(sample["input_ids"].tolist()): sample for sample in CaptureDataset(dataset)}

    def states(self, input_ids: torch.Tensor) -> States:
        sample = self._samples[tuple(input_ids.tolist())]
        noise = torch.randn(len(input_ids), SPEC.hidden_size)
        layers = sample["hidden_states"].unbind(1)
        return States((noise, *layers, noise), sample["last_hidden_state"], sample["last_hidden_state_prenorm"])


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_dataset(tmp_path, SPEC, [3, 4], [5])
    known = KnownStates(tmp_path)
    monkeypatch.setattr(Oracle, "load", lambda *_, **__: known)
    return tmp_path


def run(*arguments: Any) -> Result:
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def damage(dataset: Path) -> None:
    """Exchange the last hidden states before and after the norm in the file itself."""
    path = dataset / "shard-000000.safetensors"
    content = path.read_bytes()
    names = b'"last_hidden_state":', b'"last_hidden_state_prenorm":', b'"xxxxx":'
    for old, new in ((names[0], names[2]), (names[1], names[0]), (names[2], names[1])):
        content = content.replace(old, new)
    path.write_bytes(content)


def test_right_captures_exit_with_0(dataset: Path) -> None:
    result = run(dataset)
    assert result.exit_code == 0
    assert "3 captures (12 tokens, bfloat16)" in result.stdout
    content = json.loads(run(dataset, "--json", "--sample", 2).stdout)
    assert (content["ok"], content["samples"], content["worst_error"]) == (True, 2, 0.0)


def test_wrong_captures_exit_with_1_and_say_what_they_look_like(dataset: Path) -> None:
    damage(dataset)
    result = run(dataset, "--json")
    assert result.exit_code == 1
    kinds = {kind["name"]: kind["looks_like"] for kind in json.loads(result.stdout)["kinds"] if not kind["ok"]}
    assert kinds["last_hidden_state_prenorm"] == "last_hidden_state"
    assert run(dataset).exit_code == 1


def test_a_damaged_byte_is_found_if_asked_for(dataset: Path) -> None:
    path = dataset / "shard-000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert run(dataset).exit_code == 0
    assert isinstance(run(dataset, "--checksums").exception, DatasetError)


def test_a_truncated_shard_is_an_error(dataset: Path) -> None:
    path = dataset / "shard-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = run(dataset)
    assert isinstance(result.exception, DatasetError) and "shard-000001.safetensors is truncated" in str(
        result.exception
    )


def test_help_has_an_example() -> None:
    assert "sglang-capture verify captures --sample 16" in " ".join(run("--help").stdout.split())
