"""SpecForge's offline training of DFlash and Domino drafts: ``.ckpt`` files in the folders of its EAGLE-3 data.

For a sample of S tokens and L layers:

    input_ids       int64 [S]
    loss_mask       int64 [S]
    hidden_states   bfloat16 [1, S, L*H]    the layers side by side, in ascending order

Nothing is shifted, and no last hidden state is read: the labels are the tokens themselves. A run stops at a sample in
which no two tokens in a row are supervised (``dflash_family_data.normalize_offline_sample``, after truncation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.files import FileExporter
from sglang_capture.export.needs import need_outputs_of_layers
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dtype_notes, dump_of, need_adjacent_supervised
from sglang_capture.export.serving import dflash_serving_note
from sglang_capture.spec import CaptureSpec


class SpecForgeDFlash(FileExporter):
    name = "specforge-dflash"
    description = "SpecForge DFlash and Domino, offline (.ckpt, bfloat16)"
    options = frozenset({"seq_length"})

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_outputs_of_layers("SpecForge's DFlash", spec)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        need_adjacent_supervised(sample["loss_mask"])
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"].long(),
            "hidden_states": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1)[None],
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        return dump_of(sample_id, spec, content["input_ids"], content["hidden_states"][0], {})

    def notes(self, spec: CaptureSpec) -> list[str]:
        return [dflash_serving_note(spec), *dtype_notes(spec)]
