"""SpecForge reads our exports and trains on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.conftest import Captures, Export
from trainers.data import LONELY, assert_same, assert_teaches, left, without_last
from trainers.environments import Environment, assert_falls, needs

pytestmark = needs("specforge")
STEPS = 20


@pytest.fixture(scope="module")
def trainer() -> Environment:
    return Environment("specforge")


def test_eagle3_is_loaded_row_by_row(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data, _ = export("specforge")
    loaded = trainer.load("specforge_load", tmp_path, "eagle3", data, captures.model)
    for got, truth in zip(loaded, captures.truths, strict=True):
        rows = slice(len(truth.input_ids))
        assert_same("input_ids", got["input_ids"][rows], truth.input_ids)
        assert_same("loss_mask", got["loss_mask"][rows], without_last(truth.loss_mask))
        assert_same("hidden_state", got["hidden_state"][rows], truth.aux)
        assert_same("target", got["target"][rows], truth.post)
        assert got["attention_mask"].sum() == len(truth.input_ids)
        # What the draft is given: state t with token t + 1, and the target's word on token t + 2.
        assert_same("shifted ids", got["shifted_ids"][rows], left(truth.input_ids))
        assert_teaches("teacher", got["teacher"][rows][:-1], truth.logits[1:])


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_dflash_and_its_family_are_loaded_row_by_row(
    trainer: Environment, captures: Captures, export: Export, tmp_path: Path, algorithm: str
) -> None:
    data, summary = export(f"specforge-{algorithm}")
    assert [sample.sample_id for sample in summary.skipped] == [LONELY]
    truths = [truth for truth in captures.truths if truth.sample_id != LONELY]
    loaded = trainer.load("specforge_load", tmp_path, algorithm, data, captures.model)
    for got, truth in zip(loaded, truths, strict=True):
        rows = slice(len(truth.input_ids))
        assert_same("input_ids", got["input_ids"][rows], truth.input_ids)
        assert_same("loss_mask", got["loss_mask"][rows], truth.loss_mask)
        assert_same("hidden_states", got["hidden_states"][rows], truth.aux)
        if algorithm == "dspark":
            assert_same("last", got["target_last_hidden_states"][rows], truth.post)


@pytest.mark.parametrize(
    ("to", "algorithm"),
    [
        ("specforge", "eagle3"),
        ("specforge-dflash", "dflash"),
        ("specforge-dflash", "domino"),
        ("specforge-dspark", "dspark"),
    ],
)
def test_it_trains(
    trainer: Environment, captures: Captures, export: Export, tmp_path: Path, to: str, algorithm: str
) -> None:
    data, _ = export(to, few=True)
    losses = trainer.losses("specforge_train", tmp_path, algorithm, data, captures.model, STEPS)
    assert len(losses) == STEPS
    assert_falls(losses, to=0.7)
