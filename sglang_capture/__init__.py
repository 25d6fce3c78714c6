"""sglang-capture: hidden states out of a stock SGLang server, for training draft models.

    from sglang_capture import CaptureDataset

    for sample in CaptureDataset("captures"):
        print(sample["sample_id"], sample["hidden_states"].shape)

The names here are imported when they are first used: the plugin imports this package inside the engine, and pays for
none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_capture.shards import BlockShuffle, CaptureDataset
    from sglang_capture.spec import CaptureSpec

    __version__: str

__all__ = ["BlockShuffle", "CaptureDataset", "CaptureSpec", "__version__"]

_HOMES = {
    "BlockShuffle": "sglang_capture.shards",
    "CaptureDataset": "sglang_capture.shards",
    "CaptureSpec": "sglang_capture.spec",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sglang-capture")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
