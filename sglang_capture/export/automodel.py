"""What the two offline caches of NeMo Automodel share (read in 0.7.0: ``components/datasets/llm/offline_cache.py``).

::

    <out>/manifest.json                what the cache is; the trainer refuses a folder without it
    <out>/shard-000000.safetensors     64 samples, each padded with zeros to the same length; numbered without holes

A sample has the place that its number gives: shard ``i // 64``, slot ``i % 64``. Numbers keep the captures' own type;
Automodel trains on a CPU from float32 only. Written what Automodel reads, a shard's header names its samples and their
lengths, so that ``verify`` can read them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import safe_open

from sglang_capture.dump import Dump
from sglang_capture.export.base import ExportUsageError
from sglang_capture.export.folder import Lineage
from sglang_capture.export.needs import POST, final_norm_for_post, need_post
from sglang_capture.export.options import ExportOptions, flag
from sglang_capture.export.samples import check_finite, cut
from sglang_capture.export.sharded import ShardJob, Written
from sglang_capture.export.target_weights import TargetWeights
from sglang_capture.export.tensor_file import Stacked, write_tensors
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source, SourceError
from sglang_capture.spec import CaptureSpec

MANIFEST: Final = "manifest.json"
SHARD_SIZE: Final = 64

_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Automodel's names of the types of a cache."""

_ROWS_A_PIECE: Final = 4096


def check_options(trainer: str, spec: CaptureSpec, options: ExportOptions, needed: Sequence[str]) -> None:
    """Refuse where an option that the cache cannot be made without was not given, or there is no state after the norm.

    Raises:
        ExportError: with what to give; ExportUsageError, if that is an option.
    """
    if missing := [flag(name) for name in needed if name not in options.given]:
        raise ExportUsageError(
            f"{trainer} needs {', '.join(missing)}: the cache holds weights of the target (--model, its directory) and "
            "samples padded to one length (--seq-length, as in the recipe)"
            + (", and its targets are over a draft vocabulary (--draft-vocab-size)" * ("draft_vocab_size" in needed))
        )
    need_post(trainer, spec, options)


def padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """``[T, …]`` as ``[1, length, …]``, zeros behind."""
    whole = rows.new_zeros(1, length, *rows.shape[1:])
    whole[0, : len(rows)] = rows
    return whole


class CacheJob(ShardJob):
    """A run over either cache; ``length`` is the one all samples are padded or cut to."""

    samples_a_file = SHARD_SIZE

    def __init__(self, dataset: CaptureDataset, options: ExportOptions) -> None:
        if options.model is None or options.seq_length is None:
            raise ValueError("check_options comes first")
        self.dataset, self.spec, self.length = dataset, dataset.spec, options.seq_length
        self.model = options.model
        self.target = TargetWeights(self.model, self.spec)
        self._norm = final_norm_for_post(self.spec, options)

    def file_name(self, number: int) -> str:
        return f"shard-{number:06d}.safetensors"

    def check_sample(self, sample: Mapping[str, Any]) -> None:
        kept = self._with_post(cut(sample, self.length))
        for name in ("hidden_states", POST):
            check_finite(name, kept[name])

    def sample(self, row: int) -> dict[str, Any]:
        """Sample ``row``, cut, with the last hidden state after the norm."""
        return self._with_post(cut(self.dataset[row], self.length))

    def write(self, sink: BinaryIO, rows: Sequence[int]) -> None:
        heads = [self.sample(row) for row in rows]
        metadata = {
            "sample_ids": json.dumps([sample["sample_id"] for sample in heads]),
            "lengths": json.dumps([len(sample["input_ids"]) for sample in heads]),
            "first_tokens": json.dumps([int(sample["input_ids"][0]) for sample in heads]),
        }
        write_tensors(sink, self.tensors(rows), metadata)

    @abstractmethod
    def tensors(self, rows: Sequence[int]) -> dict[str, Stacked]:
        """The tensors of a shard of samples ``rows``, integers first."""

    def numbers(self, rows: Sequence[int], take: Callable[[dict[str, Any]], torch.Tensor]) -> Stacked:
        """int64 ``[n, length]``: what ``take`` gives of each sample, padded."""
        pieces = (padded(take(self.sample(row)).long(), self.length) for row in rows)
        return Stacked(torch.int64, (len(rows), self.length), pieces)

    def states(self, rows: Sequence[int], name: str) -> Stacked:
        """``[n, length, width]``: hidden states of each sample, its layers side by side, padded."""
        width = self.spec.hidden_size * (len(self.spec.layers) if name == "hidden_states" else 1)
        pieces = (padded(self.sample(row)[name].flatten(1), self.length) for row in rows)
        return Stacked(self.spec.torch_dtype, (len(rows), self.length, width), pieces)

    def put_weights(
        self, done: Written, file: str, weights: Mapping[str, Callable[[], torch.Tensor]], dtype: torch.dtype
    ) -> None:
        """Write matrices of the target in ``dtype``; kept where they are proven to be of the same weights."""
        digest = self.spec.weights_digest

        def save(sink: BinaryIO) -> None:
            matrices = {name: read() for name, read in weights.items()}
            write_tensors(sink, {name: _converted(matrix, dtype) for name, matrix in matrices.items()}, {})

        done.put(file, f"weights {digest} as {dtype}" if digest else "", save)

    def put_manifest(self, done: Written, version: int, content: Mapping[str, Any]) -> None:
        """Write the manifest: what both caches say of themselves, and ``content``."""
        manifest = {
            "format_version": version,
            "target_model": self.model,
            "target_vocab_size": self.spec.vocab_size,
            "seq_length": self.length,
            "dtype": _DTYPES[self.spec.dtype],
            "num_samples": len(done.rows),
            "shard_size": SHARD_SIZE,
            "shuffle_seed": 0,
            "mask_reasoning_content": False,
            "mask_generation_prompt": False,
            **content,
        }
        done.put_json(MANIFEST, manifest)

    def cache_notes(self, done: Written) -> list[str]:
        """What both caches have to tell."""
        notes = [
            f"set seq_length: {self.length} in the recipe, and leave mask_reasoning_content and mask_generation_prompt "
            "false: the masks are those of the captures"
        ]
        empty = sum(not bool(cut(self.dataset[row], self.length)["loss_mask"].any()) for row in done.rows)
        if empty:
            notes.append(f"{empty} samples have no supervised token among their first {self.length}")
        if self._norm is not None:
            notes.append(self._norm.note)
        if self.spec.dtype != "float32":
            notes.append(f"the cache is in {self.spec.dtype}: Automodel trains DSpark on a CPU from float32 only")
        return notes

    def _with_post(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self._norm is not None:
            sample[POST] = self._norm(sample["last_hidden_state_prenorm"]).to(self.spec.torch_dtype)
        return sample


def read_cache(out: Path, lineage: Lineage, decode: Callable[[dict[str, Any], CaptureSpec], Dump]) -> Source:
    """The samples of a cache, in the places where Automodel takes them from.

    Args:
        decode: makes a dump of a sample: its tensors, cut to its length, with ``sample_id`` and ``first_token``.
    """
    places: dict[str, tuple[Path, int]] = {}
    try:
        samples = json.loads((out / MANIFEST).read_bytes())["num_samples"]
        for number in range(-(-samples // SHARD_SIZE)):
            file = out / f"shard-{number:06d}.safetensors"
            with safe_open(file, framework="pt") as shard:
                ids = json.loads(shard.metadata()["sample_ids"])
            places.update({sample_id: (file, slot) for slot, sample_id in enumerate(ids)})
    except Exception as error:  # whatever the readers raise
        raise SourceError(f"{out} is not what was exported ({error}): run the export again") from error

    def load(sample_id: str) -> Dump:
        file, slot = places[sample_id]
        try:
            with safe_open(file, framework="pt") as shard:
                about = shard.metadata()
                length = json.loads(about["lengths"])[slot]
                sample: dict[str, Any] = {name: shard.get_slice(name)[slot][:length] for name in shard.keys()}  # noqa: SIM118  # no mapping
            sample |= {"sample_id": sample_id, "first_token": json.loads(about["first_tokens"])[slot]}
            return decode(sample, lineage.spec)
        except Exception as error:  # whatever the readers and the tensors' shapes raise
            raise SourceError(f"{file} is not what was exported ({error}): run the export again") from error

    return Source(list(places), load)


def _converted(matrix: torch.Tensor, dtype: torch.dtype) -> Stacked:
    def pieces() -> Iterator[torch.Tensor]:
        for first in range(0, len(matrix), _ROWS_A_PIECE):
            yield matrix[first : first + _ROWS_A_PIECE].to(dtype)

    return Stacked(dtype, tuple(matrix.shape), pieces())
