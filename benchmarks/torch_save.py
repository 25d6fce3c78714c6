"""``torch.save`` of the tensors, one file a prompt: the way of SpecForge and of most scripts."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.common import Rows


def write(rows: Rows, directory: Path, number: int) -> Path:
    path = directory / f"torch-{number}.ckpt"
    states = torch.cat(rows.layers, dim=-1)[None]
    torch.save({"input_ids": rows.input_ids, "aux_hidden_state": states, "hidden_state": rows.last[None]}, path)
    return path
