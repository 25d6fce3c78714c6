"""What both examples do alike: a target, captures of what it says, and SpecForge's training and exporting."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from examples.servers import capturing, packed
from examples.tiny_language.language import conversations
from examples.tiny_language.target import train_target

SPLITS = {"train": 256, "eval": 32}
"""Conversations to train the draft on, and others to count its accepted tokens with."""


@dataclass(frozen=True)
class Work:
    """Where an example keeps its files, which target it has, and which environment SpecForge is in."""

    out: Path
    target: Path
    specforge: Path

    def ids(self, split: str) -> str:
        return f"@{self.out / split}.ids"


def chosen(description: str | None, name: str) -> tuple[Work, int, int]:
    """What the command line says: where to work, and how many steps the target and the draft are trained for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("example-out") / name)
    parser.add_argument("--specforge", type=Path, default=Path(".trainers/specforge"), help="SpecForge's environment")
    parser.add_argument("--target-steps", type=int, default=300)
    parser.add_argument("--draft-steps", type=int, default=250)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    return Work(out, out / "target", options.specforge.resolve()), options.target_steps, options.draft_steps


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def command(*arguments: str | Path, expect: int = 0, **variables: str) -> str:
    """Run a command, show it, and give back what it prints; the example ends if its exit code is another."""
    words = [str(argument) for argument in arguments]
    print("$", " ".join(words), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode != expect:
        raise SystemExit(f"{' '.join(words[:4])} … ended with exit code {done.returncode}, {expect} was expected")
    return done.stdout


def sglang_capture(*arguments: str | Path, expect: int = 0) -> str:
    """One of our own commands."""
    return command(sys.executable, "-m", "sglang_capture", *arguments, expect=expect)


def make_target(work: Work, steps: int) -> None:
    """Teach a tiny DeepSeek-V3 the language, unless that was done before."""
    done = work.target.with_suffix(".done")
    if not done.exists():
        train_target(work.target, steps=steps)
        done.touch()


def capture_answers(work: Work, *options: str, splits: Sequence[str] = tuple(SPLITS)) -> Path:
    """Let the target answer requests, and capture what it computes for them; the dataset."""
    for split in splits:
        rows = list(conversations(SPLITS[split], seed=list(SPLITS).index(split) + 1))
        (work.out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (work.out / f"{split}.ids").write_text("".join(f"{row['id']}\n" for row in rows))
    with capturing(work.target, work.out) as service:
        for split in splits:
            file = work.out / f"{split}.jsonl"
            answered = ("--generate", "--max-new-tokens", "128", "--temperature", "0")
            sglang_capture("run", file, "--service", service, *answered, *options)
        return packed(service, work.out)


def export_split(work: Work, dataset: Path, to: str, split: str) -> Path:
    """Write a split as the trainer reads it, and prove rows of what was written; the folder."""
    out = work.out / f"{to}-{split}"
    proof = ("--verify-with", work.target, "--sample", "2")
    sglang_capture("export", dataset, out, "--to", to, "--ids", work.ids(split), *proof)
    return out


def train(work: Work, samples: Path, draft: Path, steps: int, **training: object) -> Path:
    """Train a draft with SpecForge on the folder ``samples``, and write it as a model's directory; that directory."""
    name, draft_config = samples.name, draft / "config.json"
    config = {
        "model": {"target_model_path": str(work.target), "draft_model_config": str(draft_config)},
        "data": {
            "hidden_states_path": str(samples),
            "max_length": 512,
            "dataloader_num_workers": 0,
            "cache_dir": str(work.out / "cache"),
        },
        "training": {
            "num_epochs": 1000,
            "fsdp_sharding": "NO_SHARD",
            "log_interval": 25,
            "max_steps": steps,
            **training,
        },
        "output_dir": str(work.out / "checkpoints"),
        "run_id": name,
    }
    file = work.out / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    in_specforge(work, "-m", "examples.specforge_on_cpu", "train", "--config", file)
    checkpoint, trained = work.out / "checkpoints" / f"{name}-step{steps}", work.out / "draft"
    to_format = ("--to", "sglang") if training["strategy"] == "eagle3" else ("--to", "hf")
    where = ("--checkpoint", checkpoint, "--draft-config", draft_config, "--output-dir", trained)
    in_specforge(work, "-m", "examples.specforge_on_cpu", "export", *to_format, *where)
    return trained


def acceptance(work: Work, script: Path, *arguments: str | Path) -> float:
    """The acceptance length that ``script`` works out in SpecForge's environment."""
    return float(json.loads(in_specforge(work, script, *arguments).splitlines()[-1])["acceptance_length"])


def in_specforge(work: Work, *arguments: str | Path) -> str:
    """Python in SpecForge's own environment, which has not this one's packages; our scripts are on its path."""
    return command(work.specforge / "bin/python", *arguments, PYTHONPATH=str(Path(__file__).parents[1]))
