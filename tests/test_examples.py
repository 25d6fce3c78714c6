"""The examples run for minutes, each by a command of its own (`make example-…`); here is what they are built from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.tiny_language.language import LENGTH, VERSES, conversations, verses

ROOT = Path(__file__).parents[1]
EXAMPLES = ("eagle3_cpu", "dflash_cpu")


def test_what_is_sung_are_the_verses_that_were_asked_for():
    songs = verses()
    for row in conversations(20, seed=3):
        asked, sung = (message["content"] for message in row["messages"])
        numbers = [int(word) for word in asked.removeprefix("sing ").split()]
        assert sung == "; ".join(songs[number] for number in numbers)
    assert [len(song.split()) for song in songs] == [LENGTH] * VERSES


def test_conversations_are_the_same_for_the_same_seed_and_others_for_another():
    first, again, other = (list(conversations(50, seed)) for seed in (1, 1, 2))
    assert first == again
    assert [row["messages"] for row in first] != [row["messages"] for row in other]


def test_a_target_learns_and_keeps_its_routers(tmp_path):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from examples.tiny_language.target import train_target
    from sglang_capture.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "untrained", layers=3)
    losses = train_target(tmp_path / "target", layers=3, steps=6, batch=2)
    assert losses[-1] < losses[0]
    (before,), (after,) = ((tmp_path / name).glob("*.safetensors") for name in ("untrained", "target"))
    untrained, trained = load_file(before), load_file(after)
    for name, weight in untrained.items():
        kept = name.endswith((".gate.weight", "e_score_correction_bias"))
        assert torch.equal(weight, trained[name]) is kept, name


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_says_what_it_does(example):
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}.run", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"make example-{example.removesuffix('_cpu')}" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_of_a_draft_is_one_for_its_target(example, tmp_path):
    from sglang_capture.tiny_model import make_tiny_model

    make_tiny_model(tmp_path / "target", layers=8)
    target = json.loads((tmp_path / "target/config.json").read_text())
    draft = json.loads((ROOT / "examples" / example / "draft/config.json").read_text())
    for name in ("hidden_size", "vocab_size"):
        assert draft[name] == target[name]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_target_of_make_and_in_the_documentation(example):
    command = f"example-{example.removesuffix('_cpu')}"
    assert f"\n{command}: " in (ROOT / "Makefile").read_text()
    assert f"make {command}" in (ROOT / "examples/README.md").read_text()
