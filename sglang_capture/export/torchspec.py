"""TorchSpec's offline EAGLE-3 dataset (``build_offline_eagle3_dataset``).

Its loader reads these files, but no training of TorchSpec's calls that loader (6f21829): its trainer wants other names
and shifts again what the dataset has shifted. So this loads, and cannot be trained upstream.

It reads every ``*.ckpt`` below the folder. For a sample of S tokens:

    input_ids           int64 [S]
    loss_mask           int64 [S]
    aux_hidden_states   bfloat16 [1, S, 3H]   the three layers side by side: low, middle, high
    hidden_states       bfloat16 [1, S, H]    the last hidden state, after the final norm
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.files import FileExporter
from sglang_capture.export.needs import POST, need_post, need_three_layers
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dtype_notes, dump_of
from sglang_capture.layers import output_of
from sglang_capture.spec import CaptureSpec


class TorchSpec(FileExporter):
    name = "torchspec"
    description = "TorchSpec EAGLE-3, offline: loads, cannot be trained upstream (.ckpt, bfloat16)"
    options = frozenset({"model", "seq_length"})

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_three_layers("TorchSpec's EAGLE-3", spec)
        need_post("TorchSpec", spec, options)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"].long(),
            "aux_hidden_states": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1)[None],
            "hidden_states": as_bfloat16(POST, sample[POST])[None],
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        last = {POST: content["hidden_states"][0]}
        return dump_of(sample_id, spec, content["input_ids"], content["aux_hidden_states"][0], last)

    def notes(self, spec: CaptureSpec) -> list[str]:
        layers, outputs = list(spec.layers), list(output_of(spec.layers))
        return [
            "loads, cannot be trained upstream: nothing in TorchSpec calls its loader of offline data",
            f"aux_hidden_states holds hidden-state indices {layers}: outputs of layers {outputs}, as TorchSpec counts",
            *dtype_notes(spec),
        ]
