"""Small specs, dumps and datasets with rows that can be told apart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_capture import spool
from sglang_capture.dump import Dump
from sglang_capture.shards import DatasetWriter, Sample
from sglang_capture.spec import CaptureSpec


def make_spec(**changes: Any) -> CaptureSpec:
    fields: dict[str, Any] = {
        "layers": (3, 31, 59),
        "last_hidden": "post",
        "hidden_size": 8,
        "num_layers": 61,
        "vocab_size": 512,
        "dtype": "bfloat16",
        "architecture": "DeepseekV3ForCausalLM",
        "model_path": "/models/tiny",
    }
    return CaptureSpec(**{**fields, **changes})


def make_dump(spec: CaptureSpec, capture_id: str, tokens: int, seed: int = 0) -> Dump:
    generator = torch.Generator().manual_seed(seed * 1000 + tokens)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=generator).to(spec.torch_dtype)

    return Dump(
        capture_id=capture_id,
        request_id=f"request-{capture_id}",
        spec=spec,
        input_ids=torch.randint(spec.vocab_size, (tokens,), generator=generator),
        hidden_states=rows(len(spec.layers), spec.hidden_size),
        last_hidden={key: rows(spec.hidden_size) for key in spec.last_hidden_keys},
    )


def save_dump(directory: Path, dump: Dump) -> Path:
    """A ``.pt`` as the spool holds it."""
    path = directory / f"{dump.capture_id}.pt"
    content = {
        "capture_id": dump.capture_id,
        "request_id": dump.request_id,
        "input_ids": dump.input_ids,
        "hidden_states": dump.hidden_states,
        "layers": list(dump.spec.layers),
        **dump.last_hidden,
        "spec": dump.spec.to_json(),
    }
    torch.save(content, path)
    return path


def make_samples(spec: CaptureSpec, lengths: Iterable[int], prefix: str = "s") -> list[Sample]:
    return [
        Sample(f"{prefix}{number}", make_dump(spec, f"{prefix}{number}", length, seed=number))
        for number, length in enumerate(lengths)
    ]


def make_dataset(directory: Path, spec: CaptureSpec, *shards: Iterable[int]) -> list[Sample]:
    """A dataset with a shard for each list of lengths; returns its samples in order."""
    everything: list[Sample] = []
    with DatasetWriter(directory, spec) as writer:
        for number, lengths in enumerate(shards):
            samples = make_samples(spec, lengths, prefix=f"shard{number}-")
            writer.write_shard(samples)
            everything += samples
    return everything


def watch_removals(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """For each capture that is removed from here on: was its dump still mapped into this process?"""
    removed: dict[str, bool] = {}
    remove = spool.remove

    def look(directory: Path, capture_id: str) -> bool:
        removed[capture_id] = f"/{capture_id}.pt" in Path("/proc/self/maps").read_text()
        return remove(directory, capture_id)

    monkeypatch.setattr(spool, "remove", look)
    return removed
