"""A safetensors file, written piece by piece: a tensor of any size, and a few rows of it in memory.

The library's ``save_file`` wants every tensor whole. Here a tensor comes as pieces that follow each other along the
first dimension, so that a file of hundreds of samples costs the memory of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch

from sglang_capture.shards.layout import build_header


@dataclass(frozen=True)
class Stacked:
    """A tensor of the file: ``pieces``, one after another, are ``[*shape]`` of ``dtype``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[torch.Tensor]


def whole(tensor: torch.Tensor) -> Stacked:
    """A tensor that is at hand."""
    return Stacked(tensor.dtype, tuple(tensor.shape), (tensor,))


def write_tensors(sink: BinaryIO, tensors: Mapping[str, Stacked], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` in their order; give those of wide types first, so that each begins at a multiple of its width.

    The pieces of a tensor are asked for when its turn has come: one that is known only after another was computed
    goes behind it.

    Raises:
        ValueError: the pieces are of another type, or are not the bytes that the shape says.
    """
    header, _ = build_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    sink.write(header)
    for name, tensor in tensors.items():
        left = torch.Size(tensor.shape).numel()
        for piece in tensor.pieces:
            if piece.dtype != tensor.dtype:
                raise ValueError(f"a piece of {name} is {piece.dtype}, expected {tensor.dtype}")
            left -= piece.numel()
            sink.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
        if left:
            raise ValueError(f"{name} is {left} items short of {list(tensor.shape)}")
