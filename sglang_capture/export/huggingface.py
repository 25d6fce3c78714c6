"""A table that ``datasets.load_from_disk`` maps: one row a sample, hidden states included.

::

    <out>/data-00000.arrow, data-00001.arrow …    about 1 GiB of captures each, one record batch a sample
    <out>/state.json, dataset_info.json           columns, files, and the torch format

For a sample of T tokens and L layers:

    sample_id                  string
    input_ids                  int64 [T]
    loss_mask                  uint8 [T]
    hidden_states              [T, L, H]
    last_hidden_state          [T, H]    after the final norm, if captured; last_hidden_state_prenorm before it

Arrow has no bfloat16. Captures in bfloat16 are written as float32: every number is exactly the one that was captured,
any reader of arrow understands it, and ``.bfloat16()`` gives the captured bits back; it costs twice the bytes. The bits
in a column of integers would cost none, but whoever did not know would get numbers that mean nothing, and float16
cannot hold the largest states of large models. Captures in float16 and float32 are written as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from sglang_capture.dump import Dump
from sglang_capture.export.arrow import LONGEST, SEAL, write_batches, write_state
from sglang_capture.export.base import UnfitSampleError
from sglang_capture.export.folder import Lineage
from sglang_capture.export.libraries import need_library
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import check_finite, cut, dump_of
from sglang_capture.export.sharded import ShardedExporter, ShardJob, Written
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source, SourceError
from sglang_capture.spec import CaptureSpec

_NAME: Final = "huggingface"


class HuggingFace(ShardedExporter):
    name = _NAME
    description = "a table for datasets.load_from_disk (.arrow)"
    options = frozenset({"seq_length"})
    seal = SEAL

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_library("datasets", self.name)

    def start(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> ShardJob:
        return _Job(dataset, options)

    def read(self, out: Path, lineage: Lineage) -> Source:
        spec = lineage.spec
        try:
            table = need_library("datasets", self.name).load_from_disk(str(out))
            places = {sample_id: row for row, sample_id in enumerate(table["sample_id"])}
        except Exception as error:  # whatever the library raises
            raise SourceError(f"{out} is not what was exported ({error}): run the export again") from error

        def load(sample_id: str) -> Dump:
            try:
                row = table[places[sample_id]]
                # Back to the captured type: no number is between two of its own.
                states = {name: row[name].to(spec.torch_dtype) for name in ("hidden_states", *spec.last_hidden_keys)}
                hidden = states.pop("hidden_states")
                return dump_of(sample_id, spec, row["input_ids"], hidden, states, dtype=spec.dtype)
            except Exception as error:  # whatever the library and the tensors' shapes raise
                raise SourceError(f"{out} is not what was exported ({error}): run the export again") from error

        return Source(list(places), load)


class _Job(ShardJob):
    bytes_a_file = 1 << 30

    def __init__(self, dataset: CaptureDataset, options: ExportOptions) -> None:
        self._dataset, self._spec, self._length = dataset, dataset.spec, options.seq_length
        self._stored = torch.float16 if self._spec.dtype == "float16" else torch.float32
        self._features = _features(self._spec, str(self._stored).removeprefix("torch."))

    def file_name(self, number: int) -> str:
        return f"data-{number:05d}.arrow"

    def check_sample(self, sample: Mapping[str, Any]) -> None:
        kept = cut(sample, self._length)
        if (items := kept["hidden_states"].numel()) > LONGEST:
            raise UnfitSampleError(f"hidden_states holds {items:,} numbers, and a list of arrow's {LONGEST:,} at most")
        for name in ("hidden_states", *self._spec.last_hidden_keys):
            check_finite(name, kept[name])

    def write(self, sink: BinaryIO, rows: Sequence[int]) -> None:
        write_batches(sink, self._features, self._batches(rows), _NAME)

    def write_beside(self, done: Written) -> list[str]:
        write_state(done, self._features, done.files, _NAME)
        layers = list(self._spec.layers)
        notes = [f"hidden_states holds hidden-state indices {layers}, low to high"]
        if self._spec.dtype == "bfloat16":
            notes.append(
                "hidden states were written as float32, because arrow has no bfloat16: the numbers are exactly the "
                "captured ones (.bfloat16() gives them back), at twice the bytes"
            )
        return notes

    def _batches(self, rows: Sequence[int]) -> Iterator[dict[str, list[Any]]]:
        for row in rows:
            sample = cut(self._dataset[row], self._length)
            yield {
                name: [value.to(self._stored) if name not in ("sample_id", "input_ids", "loss_mask") else value]
                for name, value in sample.items()
            }


def _features(spec: CaptureSpec, dtype: str) -> Any:
    library = need_library("datasets", _NAME)
    return library.Features(
        {
            "sample_id": library.Value("string"),
            "input_ids": library.List(library.Value("int64")),
            "loss_mask": library.List(library.Value("uint8")),
            "hidden_states": library.Array3D((None, len(spec.layers), spec.hidden_size), dtype),
            **{name: library.Array2D((None, spec.hidden_size), dtype) for name in spec.last_hidden_keys},
        }
    )
