"""AngelSlim reads our exports and trains on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.conftest import Captures, Export
from trainers.data import assert_same, assert_teaches, by_ids
from trainers.environments import Environment, assert_falls, needs

pytestmark = needs("angelslim")
STEPS = 30
FORMATS = [("angelslim", "eagle3"), ("angelslim-dflash", "dflash")]


@pytest.fixture(scope="module")
def trainer() -> Environment:
    return Environment("angelslim")


@pytest.mark.parametrize(("to", "kind"), FORMATS)
def test_it_is_loaded_row_by_row(
    trainer: Environment, captures: Captures, export: Export, tmp_path: Path, to: str, kind: str
) -> None:
    data, _ = export(to)
    sources = trainer.sources / "AngelSlim"
    loaded = trainer.load("angelslim_load", tmp_path, kind, data, captures.model, paths=(sources, sources / "tools"))
    for got, truth in by_ids(loaded, captures.truths):
        assert_same("loss_mask", got["loss_mask"], truth.loss_mask)
        assert_same("hidden_states", got["hidden_states"], truth.aux)
        if kind == "eagle3":
            assert_same("target_hiddens", got["target_hiddens"], truth.post)
            assert_teaches("teacher", got["teacher"], truth.logits)


@pytest.mark.parametrize(("to", "kind"), FORMATS)
def test_it_trains(
    trainer: Environment, captures: Captures, export: Export, tmp_path: Path, to: str, kind: str
) -> None:
    data, _ = export(to, few=True)
    sources = trainer.sources / "AngelSlim"
    losses = trainer.losses(
        "angelslim_train", tmp_path, kind, data, captures.model, STEPS, sources / "tools", paths=(sources,)
    )
    assert_falls(losses, to=0.7)
