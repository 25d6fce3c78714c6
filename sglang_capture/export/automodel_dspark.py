"""NeMo Automodel's DSpark cache, version 1 (read in 0.7.0: ``components/datasets/llm/dspark_cache.py``).

A shard of n samples, padded to S tokens:

    input_ids, loss_mask         int64 [n, S]
    target_hidden_states         [n, S, L * H]    the layers side by side, low to high
    target_last_hidden_states    [n, S, H]        after the final norm: Automodel hooks that norm's output

Nothing is shifted. Written the shards, ``target_weights.safetensors`` holds ``embed_tokens.weight`` and
``lm_head.weight``, ``[V, H]`` each. Layer ids are outputs of layers, and -1 is the token embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sglang_capture.dump import Dump
from sglang_capture.export.automodel import MANIFEST, CacheJob, check_options, read_cache
from sglang_capture.export.folder import Lineage
from sglang_capture.export.needs import POST
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import dump_of
from sglang_capture.export.sharded import ShardedExporter, ShardJob, Written
from sglang_capture.export.tensor_file import Stacked
from sglang_capture.layers import output_of
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source
from sglang_capture.spec import CaptureSpec

_VERSION: Final = 1


class AutomodelDSpark(ShardedExporter):
    name = "automodel-dspark"
    description = "NeMo Automodel DSpark, offline cache (.safetensors)"
    options = frozenset({"model", "seq_length"})
    seal = MANIFEST

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        check_options("Automodel's DSpark", spec, options, ("model", "seq_length"))

    def start(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> ShardJob:
        return _Job(dataset, options)

    def read(self, out: Path, lineage: Lineage) -> Source:
        return read_cache(out, lineage, _decode)


class _Job(CacheJob):
    def tensors(self, rows: Sequence[int]) -> dict[str, Stacked]:
        return {
            "input_ids": self.numbers(rows, lambda sample: sample["input_ids"]),
            "loss_mask": self.numbers(rows, lambda sample: sample["loss_mask"]),
            "target_hidden_states": self.states(rows, "hidden_states"),
            "target_last_hidden_states": self.states(rows, POST),
        }

    def write_beside(self, done: Written) -> list[str]:
        spec, target = self.spec, self.target
        weights = {"embed_tokens.weight": target.embeddings, "lm_head.weight": target.head}
        self.put_weights(done, "target_weights.safetensors", weights, spec.torch_dtype)
        layers = [-1 if output is None else output for output in output_of(spec.layers)]
        self.put_manifest(
            done,
            _VERSION,
            {
                "target_model_type": target.model_type,
                "hidden_size": spec.hidden_size,
                "num_hidden_layers": spec.num_layers,
                "target_hidden_dim": spec.hidden_size * len(layers),
                "target_last_hidden_dim": spec.hidden_size,
                "target_layer_ids": layers,
                "train_data_path": f"sglang-capture dataset {self.dataset.manifest.dataset_id}",
                "train_split": None,
                "chat_template_sha256": "",
                "complete": True,
            },
        )
        return [f"the draft's target_layer_ids must be {layers} (outputs of layers)", *self.cache_notes(done)]


def _decode(sample: Mapping[str, Any], spec: CaptureSpec) -> Dump:
    last = {POST: sample["target_last_hidden_states"]}
    return dump_of(
        sample["sample_id"], spec, sample["input_ids"], sample["target_hidden_states"], last, dtype=spec.dtype
    )
