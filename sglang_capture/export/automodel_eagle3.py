"""NeMo Automodel's EAGLE-3 cache, version 2 (read in 0.7.0: ``components/datasets/llm/eagle3_cache.py``, and what makes
it there: ``components/speculative/precompute_eagle3.py``, ``eagle/target.py`` and ``eagle/core.py``).

A shard of n samples, padded to S tokens, for a draft vocabulary of D tokens:

    input_ids, loss_mask    int64 [n, S]          moved left by one: row t holds what belongs to token t + 1
    attention_mask          int64 [n, S]          1 for each token of the sample, not moved
    aux_hidden_states       [n, S, 3H]            the three layers side by side, not moved
    target_probs            [n, S, D]             row t: the target's distribution for the token after token t + 1
    position_mask           bool [n, S, 1]        row t is trained: token t + 1 is supervised, and the draft has the
                                                  target's first choice

``target_probs`` is the softmax over the draft's tokens of output head times last hidden state, taken after the final
norm; it is computed here, in float32, from the captures and the target's own head. A row without a token to follow has
logits of zero in Automodel, so an even distribution; it is never trained. The manifest names the draft's tokens
(``selected_token_ids``), and ``target_embeddings.safetensors`` holds the input embeddings: float32 ``[V, H]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from sglang_capture.dump import Dump
from sglang_capture.export.automodel import MANIFEST, CacheJob, check_options, read_cache
from sglang_capture.export.folder import Lineage
from sglang_capture.export.needs import POST, need_draft_vocabulary, need_three_layers
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import dump_of
from sglang_capture.export.serving import eagle3_serving_note
from sglang_capture.export.sharded import ShardedExporter, ShardJob, Written
from sglang_capture.export.tensor_file import Stacked
from sglang_capture.export.vocab import vocab_map
from sglang_capture.layers import output_of
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source
from sglang_capture.spec import CaptureSpec

_TRAINER: Final = "Automodel's EAGLE-3"
_VERSION: Final = 2

_ROWS: Final = 128
"""Rows of logits at once: 80 MB for a vocabulary of 160,000."""


class AutomodelEagle3(ShardedExporter):
    name = "automodel-eagle3"
    description = "NeMo Automodel EAGLE-3, offline cache (.safetensors)"
    options = frozenset({"draft_vocab_size", "model", "seq_length"})
    seal = MANIFEST

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_three_layers(_TRAINER, spec)
        check_options(_TRAINER, spec, options, ("model", "seq_length", "draft_vocab_size"))
        need_draft_vocabulary(spec, options)

    def start(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> ShardJob:
        return _Job(dataset, rows, options)

    def read(self, out: Path, lineage: Lineage) -> Source:
        return read_cache(out, lineage, _decode)


class _Job(CacheJob):
    def __init__(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> None:
        super().__init__(dataset, options)
        self._vocab = vocab_map(dataset, rows, options.draft_vocab_size or 0, seq_length=self.length)
        self.identity = "draft vocabulary " + xxhash.xxh3_64_hexdigest(self._vocab.t2d.numpy().tobytes())
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._head = self.target.head().to(self._device, torch.float32)

    def tensors(self, rows: Sequence[int]) -> dict[str, Stacked]:
        trained = torch.zeros(len(rows), self.length, 1, dtype=torch.bool)
        size = self._vocab.size
        return {
            "input_ids": self.numbers(rows, lambda sample: sample["input_ids"][1:]),
            "attention_mask": self.numbers(rows, lambda sample: torch.ones_like(sample["input_ids"])),
            "loss_mask": self.numbers(rows, lambda sample: sample["loss_mask"][1:]),
            "aux_hidden_states": self.states(rows, "hidden_states"),
            "target_probs": Stacked(
                self.spec.torch_dtype, (len(rows), self.length, size), self._probabilities(rows, trained)
            ),
            # Filled while the probabilities were written: both come from the same logits.
            "position_mask": Stacked(torch.bool, tuple(trained.shape), [trained]),
        }

    def write_beside(self, done: Written) -> list[str]:
        self.put_weights(done, "target_embeddings.safetensors", {"weight": self.target.embeddings}, torch.float32)
        layers = list(output_of(self.spec.layers))
        self.put_manifest(
            done,
            _VERSION,
            {
                "draft_vocab_size": self._vocab.size,
                "target_probs_topk": 0,
                "aux_hidden_dim": 3 * self.spec.hidden_size,
                "aux_layer_ids": layers,
                "selected_token_ids": self._vocab.target_ids.tolist(),
                "input_data": f"sglang-capture dataset {self.dataset.manifest.dataset_id}",
                "split": None,
            },
        )
        return [
            f"aux_hidden_states holds outputs of layers {layers}",
            self._vocab.note,
            eagle3_serving_note(self.spec),
            *self.cache_notes(done),
        ]

    def _probabilities(self, rows: Sequence[int], trained: torch.Tensor) -> Iterator[torch.Tensor]:
        """``target_probs`` in pieces of a few rows; ``trained`` (``position_mask``, zeros) is filled on the way."""
        size, dtype = self._vocab.size, self.spec.torch_dtype
        even = torch.full((1, size), 1 / size, dtype=dtype)
        for slot, row in enumerate(rows):
            sample = self.sample(row)
            last, mask = sample[POST][1:], sample["loss_mask"][1:].bool()
            for first in range(0, len(last), _ROWS):
                part = slice(first, first + _ROWS)
                chosen, probabilities = self._distribution(last[part])
                trained[slot, first : first + len(chosen), 0] = self._vocab.t2d[chosen] & mask[part]
                yield probabilities.to(dtype)
            for _ in range(len(last), self.length):
                yield even

    def _distribution(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of last hidden states ``[R, H]``: the target's first choices ``[R]``, and float32 ``[R, D]``."""
        logits = last.to(self._device, torch.float32) @ self._head.T
        selected = logits[:, self._vocab.target_ids.to(self._device)]
        return logits.argmax(dim=-1).cpu(), selected.softmax(dim=-1).cpu()


def _decode(sample: Mapping[str, Any], spec: CaptureSpec) -> Dump:
    """The ids are moved back; the first one, which the cache has no place for, is in the header."""
    ids = torch.cat([torch.tensor([sample["first_token"]]), sample["input_ids"][:-1]])
    return dump_of(sample["sample_id"], spec, ids, sample["aux_hidden_states"], {}, dtype=spec.dtype)
