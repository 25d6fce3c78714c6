"""The trainers' environments, and the check scripts that run inside them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "checks"
TIMEOUT_S = 1200
WANTED = os.environ.get("TRAINERS", "").split()
"""The environments whose tests run (``make test-trainers`` sets it); without one of these its tests fail."""


def needs(name: str) -> list[pytest.MarkDecorator]:
    """The marks of a module of tests that run in the environment of that name."""
    unwanted = pytest.mark.skipif(name not in WANTED, reason=f"make test-trainers TRAINERS={name} runs it")
    return [pytest.mark.trainers, unwanted]


class Environment:
    """One trainer's environment, built by ``make .trainers/NAME/.ready``."""

    def __init__(self, name: str) -> None:
        self.directory = ROOT / ".trainers" / name
        self.sources = self.directory / "sources"
        if not (self.directory / ".ready").exists():
            pytest.fail(f".trainers/{name} is not built: make test-trainers TRAINERS={name}")

    def load(
        self, script: str, out: Path, *arguments: object, paths: tuple[Path, ...] = ()
    ) -> list[dict[str, torch.Tensor]]:
        """What the trainer's own loader gives: a dictionary for each sample (see ``checks/record.py``)."""
        self._run(script, out, arguments, paths)
        loaded: list[dict[str, torch.Tensor]] = torch.load(out / "loaded.pt", weights_only=True)
        return loaded

    def losses(self, script: str, out: Path, *arguments: object, paths: tuple[Path, ...] = ()) -> list[float]:
        """The losses of a training run of the trainer's own, in order; printed, since docs/trainers.md quotes them."""
        self._run(script, out, arguments, paths)
        losses: list[float] = json.loads((out / "losses.json").read_text())
        name = " ".join([script, *(word for word in arguments if isinstance(word, str))])
        print(f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps")
        return losses

    def _run(self, script: str, out: Path, arguments: tuple[object, ...], paths: tuple[Path, ...]) -> None:
        """Run ``checks/SCRIPT.py OUT ARGUMENTS...`` with the trainer's Python; fail with its last lines if it fails.

        ``paths`` are where it imports from beside its packages: trainers that are no packages.
        """
        environment: dict[str, Any] = {
            key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "TRAINERS"
        }
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",  # with more threads than free cores, a step takes ten times as long
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [self.directory / "bin/python", CHECKS / f"{script}.py", out, *arguments]
        log = out / "log.txt"
        with log.open("w") as output:
            done = subprocess.run(
                [str(word) for word in command],
                cwd=out,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            )
        if done.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
            pytest.fail(f"{script} {' '.join(map(str, arguments))} ended with {done.returncode}:\n{tail}")


def assert_falls(losses: list[float], to: float) -> None:
    """A few samples, learnt by heart: the mean of the last five losses is below that part of the first one."""
    last = sum(losses[-5:]) / 5
    assert 0 < last < to * losses[0], f"the loss does not fall: {losses}"
