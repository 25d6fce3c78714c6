"""WebDataset: tar files that are read from front to back, for training from object stores.

::

    <out>/shard-000000.tar, shard-000001.tar …    about 1 GiB of captures each

A sample has two files in it, whose common name (the library's ``__key__``) is its number in the dataset; a sample id
may hold dots, and the library takes what follows the first dot for the kind of file:

    00000017.json    sample_id, tokens, layers (hidden-state indices), last_hidden, dtype
    00000017.pth     torch.save of input_ids int64 [T], loss_mask uint8 [T], hidden_states [T, L, H], and
                     last_hidden_state, last_hidden_state_prenorm [T, H] as captured

``.pth`` is the one kind that the library's own ``decode()`` reads and that holds bfloat16: numpy, and so ``.npy``, has
no such type. The captures' own type is kept.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from sglang_capture.dump import Dump
from sglang_capture.export.base import UnfitSampleError
from sglang_capture.export.folder import Lineage
from sglang_capture.export.libraries import need_library
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import check_finite, cut, dump_of
from sglang_capture.export.sharded import ShardedExporter, ShardJob, Written
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source, SourceError
from sglang_capture.spec import CaptureSpec

_NAME: Final = "webdataset"

_LARGEST: Final = (8 << 30) - (1 << 20)
"""Bytes of one file in a tar of the kind that the library writes (ustar), less room for what ``torch.save`` adds."""


class WebDataset(ShardedExporter):
    name = _NAME
    description = "tar files for the library webdataset (.tar of .pth and .json)"
    options = frozenset({"seq_length"})
    seal = None

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        need_library("webdataset", self.name)

    def start(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> ShardJob:
        return _Job(dataset, options)

    def read(self, out: Path, lineage: Lineage) -> Source:
        """Samples are found by their ``.json``, and read from the ``.pth`` beside it."""
        places: dict[str, tuple[Path, int, int]] = {}
        try:
            for file in sorted(out.glob("shard-*.tar")):
                places.update(_places(file))
        except (OSError, ValueError, KeyError, tarfile.TarError) as error:
            raise SourceError(f"{file} is not what was exported ({error}): run the export again") from error

        def load(sample_id: str) -> Dump:
            file, offset, size = places[sample_id]
            try:
                with file.open("rb") as stream:
                    stream.seek(offset)
                    content = torch.load(io.BytesIO(stream.read(size)), weights_only=True)
                spec = lineage.spec
                last = {name: content[name] for name in spec.last_hidden_keys}
                return dump_of(sample_id, spec, content["input_ids"], content["hidden_states"], last, dtype=spec.dtype)
            except Exception as error:  # whatever torch.load and the tensors' shapes raise
                raise SourceError(f"{file} is not what was exported ({error}): run the export again") from error

        return Source(list(places), load)


class _Job(ShardJob):
    bytes_a_file = 1 << 30

    def __init__(self, dataset: CaptureDataset, options: ExportOptions) -> None:
        self._dataset, self._spec, self._length = dataset, dataset.spec, options.seq_length

    def file_name(self, number: int) -> str:
        return f"shard-{number:06d}.tar"

    def check_sample(self, sample: Mapping[str, Any]) -> None:
        kept = cut(sample, self._length)
        size = len(kept["input_ids"]) * (self._spec.bytes_per_token + 1)
        if size > _LARGEST:
            raise UnfitSampleError(f"it takes {size:,} bytes, and a file in a tar {_LARGEST:,} at most")
        for name in ("hidden_states", *self._spec.last_hidden_keys):
            check_finite(name, kept[name])

    def write(self, sink: BinaryIO, rows: Sequence[int]) -> None:
        writer = need_library("webdataset", _NAME).TarWriter
        # The same samples give the same bytes: no time, no user of this machine.
        with writer(sink, compress=False, mtime=0, user="", group="") as tar:
            for row in rows:
                sample = cut(self._dataset[row], self._length)
                tar.write({"__key__": f"{row:08d}", "json": self._about(sample), "pth": _tensors(sample)})

    def write_beside(self, done: Written) -> list[str]:
        last = len(done.files) - 1
        pattern = f"shard-{{000000..{last:06d}}}.tar" if last else done.files[0]
        return [
            f"hidden_states holds hidden-state indices {list(self._spec.layers)}, low to high, in {self._spec.dtype}",
            f'read it with webdataset.WebDataset("{done.folder.out / pattern}", shardshuffle=False).decode()',
        ]

    def _about(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        spec = self._spec
        return {
            "sample_id": sample["sample_id"],
            "tokens": len(sample["input_ids"]),
            "layers": list(spec.layers),
            "last_hidden": spec.last_hidden,
            "dtype": spec.dtype,
        }


def _tensors(sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}


def _places(file: Path) -> dict[str, tuple[Path, int, int]]:
    """Where the tensors of each sample are in a tar: the file, the first byte, how many."""
    about: dict[str, str] = {}
    tensors: dict[str, tuple[Path, int, int]] = {}
    with tarfile.open(file) as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            if kind == "pth":
                tensors[key] = (file, member.offset_data, member.size)
            elif stream := tar.extractfile(member):
                about[key] = json.loads(stream.read())["sample_id"]
    return {sample_id: tensors[key] for key, sample_id in about.items()}
