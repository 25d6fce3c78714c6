"""safetensors' ``save_file``, one file a prompt: the way of vLLM's hidden-states connector."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common import Rows


def write(rows: Rows, directory: Path, number: int) -> Path:
    path = directory / f"safetensors-{number}.safetensors"
    states = torch.stack([*rows.layers, rows.last], dim=1)
    save_file({"hidden_states": states, "token_ids": rows.input_ids}, path)
    return path
