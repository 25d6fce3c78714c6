"""The bytes of a shard: a safetensors file whose header is known before the first row is read.

::

    8 bytes     length of the header, little-endian
    header      JSON: {"<tensor>": {"dtype", "shape", "data_offsets"}, …, "__metadata__": {text: text}},
                padded with spaces to 64 bytes
    tensors     raw rows, one tensor after the other, no gaps

With S samples, N rows in all, L layers and hidden size H, in this order (wide types first, so all are aligned):

    offsets                     int64 [S + 1]       sample s is rows offsets[s]:offsets[s + 1]
    input_ids                   int64 [N]
    hidden_states               spec.dtype [N, L, H]
    last_hidden_state           spec.dtype [N, H]   after the final norm, if the spec has it
    last_hidden_state_prenorm   spec.dtype [N, H]   before it, if the spec has it
    loss_mask                   uint8 [N]           1 = supervised

Metadata: ``format``, ``format_version``, ``spec_digest``, ``spec`` (JSON), ``sample_ids`` (JSON list of S), and
``sample_metadata`` (JSON list of S objects) where a sample has any.

The library's ``save_file`` wants each tensor whole in memory, which would be a second copy of a shard; writing the
layout by hand needs none, and any safetensors reader opens the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sglang_capture.shards.manifest import DatasetError
from sglang_capture.spec import CaptureSpec

_DTYPES: Final = {
    "I64": torch.int64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGNMENT: Final = 64
_MAX_HEADER: Final = 100_000_000
"""The library's own limit; a longer header is damage, or millions of samples in one shard."""

LOST: Final = "restore it from a copy, or move it away with the dataset and capture again"
"""What to do about a damaged shard: its dumps were freed when it was written."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor's rows are in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def row_items(self) -> int:
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        return self.row_items * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.shape[0] * self.row_bytes


@dataclass(frozen=True)
class Layout:
    """The parsed header of a shard."""

    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]

    @property
    def bytes(self) -> int:
        """The size the file must have."""
        return max(place.end for place in self.tensors.values())


def shard_tensors(spec: CaptureSpec, samples: int, tokens: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype and shape of each tensor of a shard, in the order of the file."""
    hidden, dtype = spec.hidden_size, spec.torch_dtype
    return {
        "offsets": (torch.int64, (samples + 1,)),
        "input_ids": (torch.int64, (tokens,)),
        "hidden_states": (dtype, (tokens, len(spec.layers), hidden)),
        **dict.fromkeys(spec.last_hidden_keys, (dtype, (tokens, hidden))),
        "loss_mask": (torch.uint8, (tokens,)),
    }


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """The file's first bytes up to the first tensor, and the size the whole file will have.

    Raises:
        DatasetError: the header would be longer than safetensors allows.
    """
    content: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise DatasetError(
            f"the ids and metadata of one shard take {len(text):,} bytes, and a safetensors header may have "
            f"{_MAX_HEADER:,}: put fewer samples into a shard"
        )
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + begin


def read_layout(path: Path) -> Layout:
    """Read the header of a shard; its rows are not touched.

    Raises:
        DatasetError: the file is missing or is no safetensors file, or its size is not what the header says.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            content: dict[str, Any] = json.loads(file.read(length))
            size = file.seek(0, 2)
        metadata = content.pop("__metadata__")
        layout = Layout({name: _place(entry, 8 + length) for name, entry in content.items()}, metadata)
        expected = layout.bytes
    except FileNotFoundError:
        raise DatasetError(f"{path} is missing: {LOST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"{path} is no readable shard (expected a safetensors header, found {error}): {LOST}"
        ) from error
    if size != expected:
        raise DatasetError(
            f"{path} is truncated or was changed: its header describes {expected:,} bytes, found {size:,}: {LOST}"
        )
    return layout


def _place(entry: Mapping[str, Any], data_begin: int) -> TensorPlace:
    begin, end = entry["data_offsets"]
    place = TensorPlace(_DTYPES[entry["dtype"]], tuple(entry["shape"]), data_begin + begin)
    if place.end != data_begin + end:
        raise ValueError(f"a tensor whose shape {entry['shape']} does not fill its bytes")
    return place
