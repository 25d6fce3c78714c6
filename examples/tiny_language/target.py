"""The target: a tiny DeepSeek-V3 that learns the language, in a few hundred steps on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from examples.tiny_language.language import conversations
from sglang_capture.prompts import ChatTokenizer
from sglang_capture.tiny_model import MARKER, make_tiny_model

_CODE = 3
"""Hidden dimensions that hold the router's code in a tiny model: what no layer writes to."""
_IGNORED = -100
"""The label that transformers leaves out of the loss."""


def train_target(out: Path, *, layers: int = 8, steps: int = 300, batch: int = 16, seed: int = 0) -> list[float]:
    """Make a tiny model in ``out`` and teach it to sing; the loss of each step."""
    make_tiny_model(out, layers=layers, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    trained = _keep_the_routers(model)
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for step, (ids, labels) in enumerate(_batches(out, steps, batch, seed)):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"  step {step}: loss {losses[-1]:.3f}", flush=True)
    _save(model, out)
    return losses


def _keep_the_routers(model: nn.Module) -> list[nn.Parameter]:
    """The parameters to train: all but what chooses the experts.

    A tiny model's routers never tie (see :mod:`sglang_capture.tiny_model`). Trained along they would now and then, and
    then rounding alone chooses another expert: no comparison of rows would be honest.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            parameter.requires_grad_(False)
        elif name.endswith("embed_tokens.weight"):
            parameter.register_hook(lambda gradient: _without(gradient, (..., slice(_CODE))))
        elif name.endswith("o_proj.weight") or "down_proj" in name:  # what writes into the residual stream
            parameter.register_hook(lambda gradient: _without(gradient, (..., slice(_CODE), slice(None))))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _without(gradient: Tensor, place: tuple[object, ...]) -> Tensor:
    gradient = gradient.clone()
    gradient[place] = 0
    return gradient


def _batches(model: Path, steps: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels ``[batch, longest]``: what the assistant says is learned, and padding stands at the end."""
    tokenizer = ChatTokenizer(model)
    rows = conversations(steps * batch, seed)
    for _ in range(steps):
        encoded = [tokenizer.encode_messages(next(rows)["messages"]) for _ in range(batch)]
        longest = max(len(ids) for ids, _ in encoded)
        ids = torch.zeros(batch, longest, dtype=torch.long)
        labels = torch.full((batch, longest), _IGNORED)
        for row, (tokens, mask) in enumerate(encoded):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(tokens)] = torch.where(torch.tensor(mask) == 1, torch.tensor(tokens), _IGNORED)
        yield ids, labels


def _save(model: nn.Module, out: Path) -> None:
    """Put the weights into the tiny model's own file: its config is as published checkpoints spell it, and stays."""
    (file,) = out.glob("*.safetensors")
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        model.save_pretrained(temporary)
        weights = {
            name: tensor for part in Path(temporary).glob("*.safetensors") for name, tensor in load_file(part).items()
        }
    if weights.keys() != load_file(file).keys():
        raise RuntimeError("transformers names the weights otherwise than the checkpoint that it loaded")
    save_file(weights, file, metadata={"format": "pt"})
    (out / MARKER).unlink()  # it says that these are the random weights of a seed
