"""SpecForge's offline training of EAGLE-3 drafts: ``train_eagle3`` reading ``.ckpt`` files of hidden states.

::

    <out>/rows_0-2000/data_0.ckpt        2000 samples a folder, numbered as in the dataset
    <out>/rows_2000-4000/data_2000.ckpt

Each is ``torch.save`` of a dictionary, for a sample of S tokens:

    input_ids          int64 [S]
    loss_mask          int64 [S]
    aux_hidden_state   bfloat16 [1, S, 3H]    the three layers side by side: low, middle, high
    hidden_state       bfloat16 [1, S, H]     the last hidden state, after the final norm

SpecForge multiplies ``hidden_state`` with the output head and applies no norm, and its draft's first matrix is 3H wide.
It checks neither lengths nor values, so both are ours to guarantee. Its layer numbers are output-of-layer ``k``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from sglang_capture.dump import Dump
from sglang_capture.export.base import ExportError
from sglang_capture.export.files import FileExporter, as_bfloat16
from sglang_capture.export.serving import eagle3_serving_note
from sglang_capture.layers import output_of
from sglang_capture.spec import CaptureSpec

_FILES_A_FOLDER: Final = 2000


class SpecForgeEagle3(FileExporter):
    name = "specforge"
    description = "SpecForge EAGLE-3, offline (.ckpt, bfloat16)"

    def check(self, spec: CaptureSpec) -> None:
        layers = list(spec.layers)
        if len(layers) != 3:
            raise ExportError(
                f"SpecForge's EAGLE-3 takes exactly 3 layers; found {len(layers)} ({layers}): capture again "
                "with three, for example the default ones (SGLANG_CAPTURE_LAYERS unset)"
            )
        if 0 in layers:
            raise ExportError(
                f"SpecForge's EAGLE-3 takes outputs of layers, and index 0 of {layers} is the token embeddings, which "
                "no server can feed a draft: capture again with three indices from 1 up"
            )
        if "last_hidden_state" not in spec.last_hidden_keys:
            raise ExportError(
                "SpecForge needs the last hidden state after the final norm (post), and applies no norm itself; "
                f"found last_hidden = {spec.last_hidden}: capture again with SGLANG_CAPTURE_LAST_HIDDEN=post"
            )

    def file_name(self, row: int, sample_id: str) -> str:
        first = row - row % _FILES_A_FOLDER
        return f"rows_{first}-{first + _FILES_A_FOLDER}/data_{row}.ckpt"

    def encode(self, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"].to(torch.int64),
            "aux_hidden_state": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1)[None],
            "hidden_state": as_bfloat16("last_hidden_state", sample["last_hidden_state"])[None],
        }

    def decode(self, content: Mapping[str, torch.Tensor], sample_id: str, spec: CaptureSpec) -> Dump:
        held = spec.model_copy(update={"dtype": "bfloat16", "last_hidden": "post"})
        return Dump(
            capture_id=sample_id,
            request_id="",
            spec=held,
            input_ids=content["input_ids"],
            hidden_states=content["aux_hidden_state"][0].reshape(-1, len(spec.layers), spec.hidden_size),
            last_hidden={"last_hidden_state": content["hidden_state"][0]},
        )

    def notes(self, spec: CaptureSpec) -> list[str]:
        layers, outputs = list(spec.layers), list(output_of(spec.layers))
        notes = [
            f"aux_hidden_state holds hidden-state indices {layers}: outputs of layers {outputs}, as SpecForge counts",
            eagle3_serving_note(spec),
        ]
        if spec.dtype != "bfloat16":
            notes.append(f"hidden states were converted from {spec.dtype} to bfloat16")
        return notes
