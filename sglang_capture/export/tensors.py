"""One safetensors file a sample, with all that the dataset has of it, for whatever reads safetensors.

The tensors of :class:`CaptureDataset` as they are, in the captured dtype (T tokens, L layers, hidden size H):

    input_ids                   int64 [T]
    loss_mask                   uint8 [T]
    hidden_states               [T, L, H]
    last_hidden_state           [T, H]      where captured
    last_hidden_state_prenorm   [T, H]      where captured

and in the header's ``__metadata__``: ``sample_id``, and ``sample_metadata``, JSON of what was kept beside the sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from sglang_capture.dump import Dump
from sglang_capture.export.files import FileExporter
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import check_finite, dump_of
from sglang_capture.export.tensor_file import whole, write_tensors
from sglang_capture.spec import CaptureSpec


class SafeTensors(FileExporter):
    name = "safetensors"
    description = "one safetensors file a sample, as captured"
    suffix = ".safetensors"

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        """Whatever was captured can be held."""

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
        for name, rows in tensors.items():
            if rows.is_floating_point():
                check_finite(name, rows)
        kept = json.dumps(sample["metadata"], ensure_ascii=False)
        return {"tensors": tensors, "metadata": {"sample_id": sample["sample_id"], "sample_metadata": kept}}

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        last = {key: content[key] for key in spec.last_hidden_keys}
        return dump_of(sample_id, spec, content["input_ids"], content["hidden_states"], last, dtype=spec.dtype)

    def save(self, content: dict[str, Any], sink: BinaryIO) -> None:
        widest_first = sorted(content["tensors"].items(), key=lambda item: -item[1].itemsize)
        write_tensors(sink, {name: whole(tensor) for name, tensor in widest_first}, content["metadata"])

    def load(self, file: Path) -> Mapping[str, Any]:
        tensors: dict[str, torch.Tensor] = load_file(file)
        return tensors

    def notes(self, spec: CaptureSpec) -> list[str]:
        return [f"hidden_states holds hidden-state indices {list(spec.layers)}, in this order"]
