"""How a check script hands over what it saw; it runs in a trainer's environment, so only torch is there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_LOSS = re.compile(r"'loss': '?([0-9.eE+-]+|nan)'?[,}]")


def save_loaded(out: str, samples: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """One dictionary for each sample, in the order in which the trainer gives them."""
    copies = [{name: tensor.detach().cpu().clone() for name, tensor in sample.items()} for sample in samples]
    torch.save(copies, Path(out) / "loaded.pt")


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The samples of a batch, padding and all."""
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    for row in range(len(tensors["input_ids"])):
        yield {name: tensor[row] for name, tensor in tensors.items()}


def save_losses(out: str, losses: Iterable[float]) -> None:
    """The loss of each step that the trainer logs."""
    (Path(out) / "losses.json").write_text(json.dumps([float(loss) for loss in losses]))


def save_printed_losses(out: str, train: Callable[[], object]) -> None:
    """The same, of a trainer that prints a dictionary for each step, as SpecForge and transformers' Trainer do."""
    printed = _Copied()
    with redirect_stdout(printed):
        train()
    save_losses(out, map(float, _LOSS.findall(printed.getvalue())))


class _Copied(StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        return super().write(text)


def stand_in(name: str, **members: object) -> None:
    """Put a module of that name, with these members, where the real one is not installed."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # asked for by those who only want to know whether it is there
    vars(module).update(members)
    sys.modules[name] = module
