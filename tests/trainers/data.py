"""What all trainers are given: conversations, and their rows as transformers computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_capture.dump import Dump
from sglang_capture.layers import eagle3_layers
from sglang_capture.oracle import Oracle
from sglang_capture.prompts.chat import ChatTokenizer
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.spec import CaptureSpec
from sglang_capture.tiny_model import make_tiny_model

_WEIGHTS = "model-00001-of-00001.safetensors"
_HEAD = "lm_head.weight"

LONELY = "one-supervised-token"
"""The sample that DFlash cannot use: it has no two adjacent supervised tokens."""

_TURNS: tuple[tuple[str, ...], ...] = (
    ("What is a shard?", "A file that holds many samples."),
    ("Name a colour.", "Red.", "And one more?", "Blue, or green."),
    ("Count to five.", "One, two, three, four, five."),
    ("Where do rows come from?", "They are the hidden states of a prompt, one for each token of it."),
    ("Say nothing much.", "Nothing much."),
    ("Is water wet, and why?", "Yes. It wets what it touches, and it touches itself."),
)


@dataclass(frozen=True)
class Truth:
    """One sample of S tokens as it is, for comparison with what a trainer makes of it.

    Attributes:
        input_ids, loss_mask: int64 ``[S]``.
        aux: bfloat16 ``[S, L * H]``, the layers side by side.
        post, pre: bfloat16 ``[S, H]``, the last hidden state after and before the final norm.
        logits: float32 ``[S, V]``, of the target, from unrounded states: what a teacher should say.
    """

    sample_id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    post: torch.Tensor
    pre: torch.Tensor
    logits: torch.Tensor


def make_model(directory: Path) -> None:
    """The tiny DeepSeek-V3 in bfloat16, as targets are, with an output head 20 times as large.

    A random model says nearly the same of every token, and no draft can learn that better than it knows it from the
    start; with this head the target's first choice has a half of the probability, and a loss can fall.
    """
    make_tiny_model(directory, dtype="bfloat16")
    file = directory / _WEIGHTS
    weights = load_file(file)
    save_file(weights | {_HEAD: 20 * weights[_HEAD]}, file, metadata={"format": "pt"})


def make_data(model: Path, dataset: Path) -> list[Truth]:
    """Write a dataset of the model's captures with both last hidden states, and return what is in it, in order."""
    oracle = Oracle.load(str(model))
    layers = eagle3_layers(oracle.num_layers)
    spec = CaptureSpec(
        layers=layers,
        last_hidden="both",
        hidden_size=oracle.hidden_size,
        num_layers=oracle.num_layers,
        vocab_size=oracle.vocab_size,
        dtype="bfloat16",
        architecture="DeepseekV3ForCausalLM",
        model_path=str(model),
    )
    head = tensor_of(model, _HEAD)
    truths = [_truth(oracle, head, spec, *prompt) for prompt in _prompts(model)]
    samples = [_sample(spec, truth) for truth in truths]
    with DatasetWriter(dataset, spec) as writer:
        writer.write_shard(samples[:3])
        writer.write_shard(samples[3:])
    return truths


def tensor_of(model: Path, name: str) -> torch.Tensor:
    """A weight of the tiny model, in float32."""
    with safe_open(model / _WEIGHTS, framework="pt") as weights:
        return weights.get_tensor(name).float()


def _prompts(model: Path) -> list[tuple[str, list[int], list[int]]]:
    tokenizer = ChatTokenizer(model)
    prompts = []
    for number, turns in enumerate(_TURNS):
        roles = ("user", "assistant") * (len(turns) // 2)
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        ids, mask = tokenizer.encode_messages(messages)
        assert mask is not None
        prompts.append((f"conversation-{number}", ids, mask))
    _, ids, _ = prompts[0]
    prompts.append(("plain-text", ids[::-1], [1] * len(ids)))
    prompts.append((LONELY, ids[3:20], [0] * 8 + [1] + [0] * 8))
    return prompts


def _truth(
    oracle: Oracle, head: torch.Tensor, spec: CaptureSpec, sample_id: str, ids: Sequence[int], mask: Sequence[int]
) -> Truth:
    states = oracle.states(torch.tensor(ids))
    return Truth(
        sample_id=sample_id,
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(mask),
        aux=torch.cat([states.hidden[index] for index in spec.layers], dim=1).to(torch.bfloat16),
        post=states.post.to(torch.bfloat16),
        pre=states.pre.to(torch.bfloat16),
        logits=states.post @ head.T,
    )


def _sample(spec: CaptureSpec, truth: Truth) -> Sample:
    dump = Dump(
        capture_id=truth.sample_id,
        request_id="",
        spec=spec,
        input_ids=truth.input_ids,
        hidden_states=truth.aux.reshape(len(truth.input_ids), len(spec.layers), spec.hidden_size),
        last_hidden={"last_hidden_state": truth.post, "last_hidden_state_prenorm": truth.pre},
    )
    return Sample(truth.sample_id, dump, loss_mask=truth.loss_mask)


def assert_same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit: dtype, shape and values; the message says which rows differ."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
    rows = (got != expected).reshape(len(got), -1).any(dim=1).nonzero().flatten().tolist()
    assert not rows, f"{name}: rows {rows} of {len(got)} differ"


def assert_teaches(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits of a teacher, ``[S, V]`` each: a wrong row or norm is off by half and more, bfloat16 by a hundredth."""
    off: Any = (got.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert off.max() < 0.05, f"{name}: logits of rows {(off >= 0.05).nonzero().flatten().tolist()} are off by {off}"


def left(rows: torch.Tensor) -> torch.Tensor:
    """Moved up by one row, as trainers do it: row ``t`` holds what was in row ``t + 1``, and the last one zeros."""
    return torch.cat([rows[1:], torch.zeros_like(rows[:1])])


def by_ids(
    loaded: Sequence[dict[str, torch.Tensor]], truths: Sequence[Truth], *, moved: bool = False
) -> Iterator[tuple[dict[str, torch.Tensor], Truth]]:
    """What was loaded of each sample, for trainers that read files in any order; padding is cut off.

    ``moved``: the trainer has moved the ids left by one.
    """
    assert len(loaded) == len(truths)
    for truth in truths:
        ids = left(truth.input_ids) if moved else truth.input_ids
        same = [
            sample
            for sample in loaded
            if torch.equal(sample["input_ids"][: len(ids)], ids) and not sample["input_ids"][len(ids) :].any()
        ]
        assert len(same) == 1, f"{truth.sample_id} was loaded {len(same)} times"
        yield {name: tensor[: len(ids)] for name, tensor in same[0].items()}, truth


def without_last(mask: torch.Tensor) -> torch.Tensor:
    """A mask as most trainers use it: the last token has no successor."""
    return torch.cat([mask[:-1], torch.zeros_like(mask[:1])])
