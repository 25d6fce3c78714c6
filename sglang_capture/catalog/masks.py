"""Loss masks as bytes: one bit a token, after the mask's length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LENGTH_BYTES = 4


def pack_mask(mask: Sequence[int]) -> bytes:
    """``[1, 0, 1]`` as 4 bytes of length (little-endian) and one bit for each entry."""
    bits = np.packbits(np.asarray(mask, dtype=np.uint8))
    return len(mask).to_bytes(_LENGTH_BYTES, "little") + bits.tobytes()


def unpack_mask(data: bytes) -> NDArray[np.uint8]:
    """The mask as uint8 ``[T]``, zeros and ones."""
    length = mask_length(data)
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8, offset=_LENGTH_BYTES), count=length)


def mask_length(data: bytes) -> int:
    """How many tokens a packed mask is for."""
    return int.from_bytes(data[:_LENGTH_BYTES], "little")
