"""NVIDIA Model Optimizer reads our export and trains on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.conftest import Captures, Export
from trainers.data import assert_same, by_ids
from trainers.environments import Environment, assert_falls, needs

pytestmark = needs("modelopt")
STEPS = 30


@pytest.fixture(scope="module")
def trainer() -> Environment:
    return Environment("modelopt")


def test_it_is_loaded_row_by_row(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data, _ = export("modelopt")
    for got, truth in by_ids(trainer.load("modelopt_load", tmp_path, data), captures.truths):
        assert_same("loss_mask", got["loss_mask"], truth.loss_mask)
        assert_same("aux", got["aux_hidden_states"], truth.aux)
        assert_same("last", got["base_model_hidden_states"], truth.post)
        assert got["labels"].tolist() == [*truth.input_ids[1:].tolist(), -100]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_it_trains(trainer: Environment, captures: Captures, export: Export, tmp_path: Path, kind: str) -> None:
    data, _ = export("modelopt", few=True)
    examples = trainer.sources / "Model-Optimizer/examples/speculative_decoding"
    losses = trainer.losses("modelopt_train", tmp_path, kind, data, captures.model, STEPS, examples)
    assert_falls(losses, to=0.7)
