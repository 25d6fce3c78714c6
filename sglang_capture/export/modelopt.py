"""NVIDIA Model Optimizer's offline training (``data.offline_data_path``), of EAGLE-3 and of DFlash drafts.

It takes every ``*.pt`` below the folder for a sample, in no order, and loads it with ``weights_only=True``. For a
sample of S tokens and L layers:

    input_ids               int64 [S]
    loss_mask               int64 [S]
    hidden_states           bfloat16 [S, H]     the *last* hidden state
    hidden_states_prenorm   bool                whether that is before the final norm
    aux_hidden_states       bfloat16 [S, L*H]   the layers side by side, in ascending order
    conversation_id         str

With ``--draft-vocab-size``, ``draft_vocab_cache-<size>.d2t`` is ``torch.save`` of the offsets alone, int64 ``[D]``.

Where the flag is true the trainer applies the model's norm itself (``OfflineSupervisedDataset`` in
``modelopt/torch/speculative/eagle/utils.py``), so both kinds of last hidden state are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_capture.dump import Dump
from sglang_capture.export.base import ExportError
from sglang_capture.export.files import Beside, FileExporter
from sglang_capture.export.needs import POST, PRE, need_draft_vocabulary, need_outputs_of_layers
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import as_bfloat16, dtype_notes, dump_of
from sglang_capture.export.vocab import vocab_map
from sglang_capture.layers import output_of
from sglang_capture.shards import CaptureDataset
from sglang_capture.spec import CaptureSpec


class ModelOpt(FileExporter):
    name = "modelopt"
    description = "NVIDIA Model Optimizer EAGLE-3 and DFlash, offline (.pt, bfloat16)"
    options = frozenset({"draft_vocab_size", "seq_length"})
    suffix = ".pt"

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_outputs_of_layers("Model Optimizer", spec)
        need_draft_vocabulary(spec, options)
        if not spec.last_hidden_keys:
            raise ExportError(
                "Model Optimizer needs the last hidden state, after the final norm or before it; found last_hidden = "
                "none: capture again with SGLANG_CAPTURE_LAST_HIDDEN=post"
            )

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        last = POST if POST in sample else PRE
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"].long(),
            "hidden_states": as_bfloat16(last, sample[last]),
            "hidden_states_prenorm": last == PRE,
            "aux_hidden_states": as_bfloat16("hidden_states", sample["hidden_states"]).flatten(1),
            "conversation_id": sample["sample_id"],
        }

    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        last = PRE if content.get("hidden_states_prenorm", False) else POST
        ids, aux = content["input_ids"], content["aux_hidden_states"]
        return dump_of(sample_id, spec, ids, aux, {last: content["hidden_states"]})

    def beside(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> Beside:
        size = options.draft_vocab_size
        if size is None:
            return Beside({}, [])
        vocabulary = vocab_map(dataset, rows, size, seq_length=options.seq_length)
        # Not .pt: the trainer would take it for a sample.
        file = f"draft_vocab_cache-{size}.d2t"
        told = f"set data.draft_vocab_cache to {file} of this folder, and draft_vocab_size to {size}"
        return Beside({file: vocabulary.d2t}, [vocabulary.note, told])

    def notes(self, spec: CaptureSpec) -> list[str]:
        layers, outputs = list(spec.layers), list(output_of(spec.layers))
        kind = "after" if POST in spec.last_hidden_keys else "before"
        return [
            f"aux_hidden_states holds hidden-state indices {layers}: the recipe's eagle_aux_hidden_state_layer_ids (or "
            f"DFlash's target_layer_ids) must be {outputs}, outputs of layers, as Model Optimizer counts",
            f"hidden_states is the last hidden state {kind} the final norm, and hidden_states_prenorm says so",
            "Model Optimizer trains every token, whatever the loss mask says, unless answer_only_loss is true",
            *dtype_notes(spec),
        ]
