"""The EAGLE repository's training of EAGLE-1 and EAGLE-2 drafts (``eagle/train/main.py``).

It loads *every* file below the folder it is given, so the samples have a folder of their own, ``<out>/data``. For a
sample of S tokens:

    input_ids      int64 [S]
    loss_mask      int64 [S]
    hidden_state   bfloat16 [S, H]   the last hidden state, after the final norm

Its ``max_len`` (2048) cuts longer samples, and the last entry of the mask is cleared. Its test of accuracy
(``getkacc``) begins at the second token and divides by the number of supervised ones it met.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.base import UnfitSampleError
from sglang_capture.export.files import FileExporter
from sglang_capture.export.needs import POST, need_post
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dtype_notes, dump_of
from sglang_capture.spec import CaptureSpec


class Eagle(FileExporter):
    name = "eagle"
    description = "EAGLE-1 and EAGLE-2 of the EAGLE repository (.ckpt, bfloat16)"
    options = frozenset({"model", "seq_length"})
    folder = "data/"

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_post("EAGLE", spec, options)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if not bool(sample["loss_mask"][1:-1].any()):
            raise UnfitSampleError(
                "no token between the first and the last is supervised, and the trainer's test divides by their number"
            )
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"].long(),
            "hidden_state": as_bfloat16(POST, sample[POST]),
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        return dump_of(sample_id, spec, content["input_ids"], None, {POST: content["hidden_state"]})

    def notes(self, spec: CaptureSpec) -> list[str]:
        return [
            "the folder for the trainer (--tmpdir) is data/ in the folder of the export: it loads every file below it",
            "EAGLE cuts samples to 2048 tokens: --seq-length 2048 leaves those out that have no supervised token there",
            *dtype_notes(spec),
        ]
