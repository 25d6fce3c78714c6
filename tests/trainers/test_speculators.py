"""speculators reads our export and trains on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainers.conftest import Captures, Export
from trainers.data import assert_same
from trainers.environments import Environment, assert_falls, needs

pytestmark = needs("speculators")
STEPS = 20


@pytest.fixture(scope="module")
def trainer() -> Environment:
    return Environment("speculators")


@pytest.mark.parametrize("backend", ["file", "fp8"])
def test_it_is_loaded_row_by_row(
    trainer: Environment, captures: Captures, export: Export, tmp_path: Path, backend: str
) -> None:
    data, _ = export("speculators", fp8=backend == "fp8")
    loaded = trainer.load("speculators_load", tmp_path, data, backend, 3, captures.truths[0].post.shape[1])
    count = len(captures.truths)
    for whole, packed, truth in zip(loaded[:count], loaded[count:], captures.truths, strict=True):
        assert_same("input_ids", whole["input_ids"], truth.input_ids)
        assert_same("loss_mask", whole["loss_mask"], truth.loss_mask)
        states = {"hidden_states": truth.aux, "verifier_last_hidden_states": truth.pre}
        for name, expected in states.items():
            if backend == "file":
                assert_same(name, whole[name], expected)
            else:  # e4m3 keeps 3 bits behind the first
                torch.testing.assert_close(whole[name].float(), expected.float(), rtol=0.07, atol=0.02)
        # EAGLE-3's own shift, in one pack of all samples: state t with token t + 1 and the target's state there.
        assert_same("packed ids", packed["input_ids"], truth.input_ids[1:])
        assert_same("packed mask", packed["loss_mask"], truth.loss_mask[1:])
        assert_same("packed states", packed["hidden_states"], whole["hidden_states"][:-1])
        assert_same("packed last", packed["verifier_last_hidden_states"], whole["verifier_last_hidden_states"][1:])


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_it_trains(trainer: Environment, captures: Captures, export: Export, tmp_path: Path, kind: str) -> None:
    data, _ = export("speculators", few=True)
    losses = trainer.losses("speculators_train", tmp_path, kind, data, captures.model, STEPS)
    assert len(losses) == STEPS
    assert_falls(losses, to=0.7)
    assert list(tmp_path.glob("checkpoints/*/model.safetensors"))
