"""SpecForge's offline training of DSpark drafts: its DFlash files, and the last hidden state after the final norm.

    target_last_hidden_states   bfloat16 [1, S, H]

SpecForge multiplies it with the output head and applies no norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.needs import POST, need_outputs_of_layers, need_post
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dump_of
from sglang_capture.export.specforge_dflash import SpecForgeDFlash
from sglang_capture.spec import CaptureSpec


class SpecForgeDSpark(SpecForgeDFlash):
    name = "specforge-dspark"
    description = "SpecForge DSpark, offline (.ckpt, bfloat16)"
    options = frozenset({"model", "seq_length"})

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_outputs_of_layers("SpecForge's DSpark", spec)
        need_post("SpecForge's DSpark", spec, options)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().encode(sample), "target_last_hidden_states": as_bfloat16(POST, sample[POST])[None]}

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        last = {POST: content["target_last_hidden_states"][0]}
        return dump_of(sample_id, spec, content["input_ids"], content["hidden_states"][0], last)
