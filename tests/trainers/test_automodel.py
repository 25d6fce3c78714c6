"""NeMo Automodel reads our caches, and its EAGLE-3 trainer module trains on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainers.conftest import Captures, Export
from trainers.data import assert_same, left, tensor_of
from trainers.environments import Environment, assert_falls, needs

pytestmark = needs("automodel")
STEPS = 40
LENGTH, DRAFT_VOCABULARY = 64, 256


@pytest.fixture(scope="module")
def trainer() -> Environment:
    return Environment("automodel")


def test_eagle3_is_loaded_row_by_row(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data = eagle3(captures, export)
    *loaded, weights = trainer.load("automodel_load", tmp_path, "eagle3", data)
    assert_same("embeddings", weights["embeddings"], tensor_of(captures.model, "model.embed_tokens.weight"))
    tokens = torch.tensor(json.loads((data / "manifest.json").read_text())["selected_token_ids"])
    for got, truth in zip(loaded, captures.truths, strict=True):
        rows = slice(len(truth.input_ids))
        # Automodel's cache holds ids, mask and target moved left; states and attention mask stay.
        assert_same("input_ids", got["input_ids"][rows], left(truth.input_ids))
        assert_same("loss_mask", got["loss_mask"][rows], left(truth.loss_mask))
        assert got["attention_mask"].sum() == len(truth.input_ids)
        assert_same("aux_hidden_states", got["aux_hidden_states"][rows], truth.aux)
        expected = truth.logits[1:, tokens].softmax(dim=-1)
        off = (got["target_probs"][rows][:-1].float() - expected).abs().sum(dim=-1)
        assert off.max() < 0.05, f"{truth.sample_id}: distributions are off by {off}"
        chosen = torch.isin(truth.logits[1:].argmax(dim=-1), tokens) & truth.loss_mask[1:].bool()
        # A first choice that is nearly a tie may fall to the other side in bfloat16.
        assert (got["position_mask"][rows][:-1, 0] != chosen).sum() <= 1


def test_dspark_is_loaded_row_by_row(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data, _ = export("automodel-dspark", model=str(captures.model), seq_length=LENGTH)
    *loaded, weights = trainer.load("automodel_load", tmp_path, "dspark", data)
    for name, key in (("embeddings", "model.embed_tokens.weight"), ("head", "lm_head.weight")):
        assert_same(name, weights[name], tensor_of(captures.model, key).to(torch.bfloat16))
    for got, truth in zip(loaded, captures.truths, strict=True):
        rows = slice(len(truth.input_ids))
        assert_same("input_ids", got["input_ids"][rows], truth.input_ids)
        assert_same("loss_mask", got["loss_mask"][rows], truth.loss_mask)
        assert_same("target_hidden_states", got["target_hidden_states"][rows], truth.aux)
        assert_same("target_last_hidden_states", got["target_last_hidden_states"][rows], truth.post)


def test_eagle3_trains(trainer: Environment, captures: Captures, export: Export, tmp_path: Path) -> None:
    data = eagle3(captures, export, few=True)
    assert_falls(trainer.losses("automodel_train", tmp_path, data, STEPS), to=0.7)


def eagle3(captures: Captures, export: Export, *, few: bool = False) -> Path:
    options = {"seq_length": LENGTH, "draft_vocab_size": DRAFT_VOCABULARY}
    return export("automodel-eagle3", few=few, model=str(captures.model), **options)[0]
