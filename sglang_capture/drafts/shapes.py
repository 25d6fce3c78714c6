"""Shapes of a draft's weights, from the headers of its safetensors files alone."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from sglang_capture.errors import UsageError


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """By tensor name, for all ``*.safetensors`` in ``directory``; empty if there are none.

    Raises:
        UsageError: a file is no safetensors file, or cut off.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{file} cannot be read as safetensors: {error}") from error
    return shapes
