"""AngelSlim's offline training of EAGLE-3 drafts (``tools/train_eagle3_offline.py``).

It reads every ``*.ckpt`` below the folder. For a sample of S tokens, each with a batch dimension of 1:

    input_ids       int64 [1, S]
    loss_mask       int64 [1, S]
    hidden_states   bfloat16 [1, S, 3H]   the three layers side by side: low, middle, high
    target_hiddens  bfloat16 [1, S, H]    the last hidden state, after the final norm

and, without which the tool stops, beside the folders of samples:

    vocab_mapping.pt    d2t int64 [D], offsets; t2d bool [V]

A file that lacks a key is dropped with a warning, and another takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.files import Beside, FileExporter
from sglang_capture.export.needs import POST, need_draft_vocabulary, need_post, need_three_layers
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dtype_notes, dump_of
from sglang_capture.export.serving import eagle3_serving_note
from sglang_capture.export.vocab import vocab_map
from sglang_capture.layers import output_of
from sglang_capture.shards import CaptureDataset
from sglang_capture.spec import CaptureSpec


class AngelSlimEagle3(FileExporter):
    name = "angelslim"
    description = "AngelSlim EAGLE-3, offline (.ckpt, bfloat16, vocab_mapping.pt)"
    options = frozenset({"draft_vocab_size", "model", "seq_length"})

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_three_layers("AngelSlim's EAGLE-3", spec)
        need_post("AngelSlim", spec, options)
        need_draft_vocabulary(spec, options)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": sample["input_ids"][None],
            "loss_mask": sample["loss_mask"].long()[None],
            "hidden_states": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1)[None],
            "target_hiddens": as_bfloat16(POST, sample[POST])[None],
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        last = {POST: content["target_hiddens"][0]}
        return dump_of(sample_id, spec, content["input_ids"][0], content["hidden_states"][0], last)

    def beside(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> Beside:
        size = options.draft_vocab_size or dataset.spec.vocab_size
        vocabulary = vocab_map(dataset, rows, size, seq_length=options.seq_length)
        notes = [
            f"the draft's draft_vocab_size must be {vocabulary.size}, the size of vocab_mapping.pt",
            vocabulary.note,
        ]
        return Beside({"vocab_mapping.pt": vocabulary.pair}, notes)

    def notes(self, spec: CaptureSpec) -> list[str]:
        layers, outputs = list(spec.layers), list(output_of(spec.layers))
        return [
            f"hidden_states holds hidden-state indices {layers}: outputs of layers {outputs}, as AngelSlim counts",
            eagle3_serving_note(spec),
            *dtype_notes(spec),
        ]
