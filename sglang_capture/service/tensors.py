"""The tensors of one capture, from wherever they are, and as the bytes of a safetensors file.

Rows are views of mapped files: a capture of a gigabyte costs its pages in the page cache, and no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_capture.catalog import CaptureRow, Catalog, is_record_of, unpack_mask
from sglang_capture.dump import DumpError
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.spooled import read_spooled
from sglang_capture.shards import DatasetError, read_manifest
from sglang_capture.shards.layout import build_header
from sglang_capture.shards.reader import Shard

_CHUNK = 1 << 20


@dataclass(frozen=True)
class CaptureTensors:
    """``input_ids`` ``[T]``, ``hidden_states`` ``[T, L, H]``, the last hidden states ``[T, H]`` and ``loss_mask``
    ``[T]``, as far as the capture has them; ``spec`` is the lineage as JSON."""

    capture_id: str
    spec: str
    tensors: dict[str, torch.Tensor]

    def safetensors(self) -> tuple[int, Iterator[bytes]]:
        """The length of the safetensors file, and the file piece by piece."""
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        header, size = build_header(shapes, {"capture_id": self.capture_id, "spec": self.spec})
        return size, self._pieces(header)

    def _pieces(self, header: bytes) -> Iterator[bytes]:
        yield header
        for tensor in self.tensors.values():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _CHUNK):
                yield bytes(data[start : start + _CHUNK])


def capture_tensors(row: CaptureRow, spool_dir: Path, data_dir: Path, catalog: Catalog) -> CaptureTensors:
    """The tensors of a capture that was read with its shard. Blocks.

    Raises:
        ProblemError: it has none (``no-tensors``), or its file cannot be read.
    """
    try:
        if row.state == "spooled":
            return _from_dump(row.id, spool_dir, catalog)
        if row.shard is not None and row.sample is not None:
            return _from_shard(row.id, data_dir / row.shard.dataset, row.shard.name, row.sample)
    except FileNotFoundError:
        raise ProblemError("no-tensors", f"the dump of {row.id} has just been packed or removed: ask again") from None
    except (DumpError, DatasetError) as error:
        raise ProblemError("no-tensors", str(error)) from error
    why = f": {row.reason}" if row.reason else "; its dump has not been seen yet"
    raise ProblemError("no-tensors", f"{row.id} is {row.state}{why}")


def _from_dump(capture_id: str, spool_dir: Path, catalog: Catalog) -> CaptureTensors:
    """Rows and mask of one request: the record is read whole, then the dump is proven to be that of the record."""
    row = catalog.captures.get(capture_id, with_mask=True)
    if row is None or row.state != "spooled":
        raise FileNotFoundError(capture_id)
    dump, facts = read_spooled(spool_dir, capture_id)
    if not is_record_of(row, facts):
        catalog.captures.record_dumps([facts])
        raise ProblemError("no-tensors", f"the dump of {capture_id} was replaced by another: ask again for that one")
    tensors = {"input_ids": dump.input_ids, "hidden_states": dump.hidden_states, **dump.last_hidden}
    if row.loss_mask is not None:
        tensors["loss_mask"] = torch.from_numpy(unpack_mask(row.loss_mask))
    return CaptureTensors(capture_id, dump.spec.to_json(), tensors)


def _from_shard(capture_id: str, dataset: Path, name: str, sample: int) -> CaptureTensors:
    entry = next((entry for entry in read_manifest(dataset).shards if entry.file == name), None)
    if entry is None:
        raise DatasetError(f"the manifest of {dataset} no longer names {name}: restart the service to find out more")
    shard = Shard(dataset, entry)
    begin, end = int(shard.offsets[sample]), int(shard.offsets[sample + 1])
    pages = shard.open()
    names = [name for name in shard.layout.tensors if name != "offsets"]
    tensors = {name: shard.rows(pages, name, begin, end) for name in names}
    return CaptureTensors(capture_id, shard.layout.metadata["spec"], tensors)
