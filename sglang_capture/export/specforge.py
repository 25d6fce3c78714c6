"""SpecForge's offline training of EAGLE-3 drafts: ``train_eagle3`` reading ``.ckpt`` files of hidden states.

::

    <out>/rows_0-2000/data_0.ckpt        2000 samples a folder, numbered as in the dataset
    <out>/rows_2000-4000/data_2000.ckpt
    <out>/vocab_mapping/vocab_mapping.pt    with --draft-vocab-size: d2t int64 [D], offsets; t2d bool [V]

Each is ``torch.save`` of a dictionary, for a sample of S tokens:

    input_ids          int64 [S]
    loss_mask          int64 [S]
    aux_hidden_state   bfloat16 [1, S, 3H]    the three layers side by side: low, middle, high
    hidden_state       bfloat16 [1, S, H]     the last hidden state, after the final norm

SpecForge multiplies ``hidden_state`` with the output head and applies no norm, and its draft's first matrix is 3H wide.
It checks neither lengths nor values, so both are ours to guarantee. Its layer numbers are output-of-layer ``k``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

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

_VOCABULARY: Final = "vocab_mapping/vocab_mapping.pt"


class SpecForgeEagle3(FileExporter):
    name = "specforge"
    description = "SpecForge EAGLE-3, offline (.ckpt, bfloat16)"
    options = frozenset({"draft_vocab_size", "model", "seq_length"})

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_three_layers("SpecForge's EAGLE-3", spec)
        need_post("SpecForge", spec, options)
        need_draft_vocabulary(spec, options)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"].long(),
            "aux_hidden_state": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1)[None],
            "hidden_state": as_bfloat16(POST, sample[POST])[None],
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        last = {POST: content["hidden_state"][0]}
        return dump_of(sample_id, spec, content["input_ids"], content["aux_hidden_state"][0], last)

    def beside(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> Beside:
        if options.draft_vocab_size is None:
            return Beside({}, [])
        vocabulary = vocab_map(dataset, rows, options.draft_vocab_size, seq_length=options.seq_length)
        told = (
            f"set model.vocab_mapping_path to {_VOCABULARY}, or SpecForge makes a map of its own from the same counts"
        )
        return Beside({_VOCABULARY: vocabulary.pair}, [vocabulary.note, told])

    def notes(self, spec: CaptureSpec) -> list[str]:
        layers, outputs = list(spec.layers), list(output_of(spec.layers))
        return [
            f"aux_hidden_state holds hidden-state indices {layers}: outputs of layers {outputs}, as SpecForge counts",
            eagle3_serving_note(spec),
            *dtype_notes(spec),
        ]
