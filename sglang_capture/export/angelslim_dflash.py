"""AngelSlim's offline training of DFlash drafts (``tools/train_dflash_offline.py``): its EAGLE-3 files, less.

For a sample of S tokens and L layers:

    input_ids       int64 [1, S]
    loss_mask       int64 [1, S]
    hidden_states   bfloat16 [1, S, L*H]   the layers side by side, in ascending order

No last hidden state and no vocabulary map: the labels are the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.files import FileExporter
from sglang_capture.export.needs import need_outputs_of_layers
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dtype_notes, dump_of
from sglang_capture.export.serving import dflash_serving_note
from sglang_capture.spec import CaptureSpec


class AngelSlimDFlash(FileExporter):
    name = "angelslim-dflash"
    description = "AngelSlim DFlash, offline (.ckpt, bfloat16)"
    options = frozenset({"seq_length"})

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_outputs_of_layers("AngelSlim's DFlash", spec)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": sample["input_ids"][None],
            "loss_mask": sample["loss_mask"].long()[None],
            "hidden_states": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1)[None],
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        return dump_of(sample_id, spec, content["input_ids"][0], content["hidden_states"][0], {})

    def notes(self, spec: CaptureSpec) -> list[str]:
        return [dflash_serving_note(spec), *dtype_notes(spec)]
