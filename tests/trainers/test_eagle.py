"""The EAGLE repository (EAGLE-1 and EAGLE-2) reads our export and trains on it; TorchSpec, in the same environment,
reads its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.conftest import Captures, Export
from trainers.data import assert_same, by_ids, left, without_last
from trainers.environments import Environment, assert_falls, needs

pytestmark = needs("eagle")
STEPS = 30


@pytest.fixture(scope="module")
def trainer() -> Environment:
    return Environment("eagle")


def test_eagle_loads_it_row_by_row(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data, _ = export("eagle")
    main = trainer.sources / "EAGLE/eagle/train/main.py"
    loaded = trainer.load("eagle_load", tmp_path, data / "data", main)
    for got, truth in by_ids(loaded, captures.truths, moved=True):
        assert_same("loss_mask", got["loss_mask"], without_last(truth.loss_mask))
        # Its collator pads with float32, which bfloat16 fits into.
        assert_same("hidden_states", got["hidden_states"], truth.post.float())
        assert_same("target", got["target"], left(truth.post).float())


def test_eagle_trains(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data, _ = export("eagle", few=True)
    losses = trainer.losses(
        "eagle_train", tmp_path, data / "data", captures.model, STEPS, paths=(trainer.sources / "EAGLE",)
    )
    assert_falls(losses, to=0.9)


def test_torchspec_loads_it_row_by_row(
    trainer: Environment, captures: Captures, export: Export, tmp_path: Path
) -> None:
    data, _ = export("torchspec")
    loaded = trainer.load("torchspec_load", tmp_path, data, paths=(trainer.sources / "TorchSpec",))
    for got, truth in by_ids(loaded, captures.truths, moved=True):
        assert_same("loss_mask", got["loss_mask"], without_last(truth.loss_mask))
        assert_same("hidden_states", got["hidden_states"], truth.aux)
        assert_same("target", got["target"], left(truth.post))
