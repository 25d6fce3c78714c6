"""A digest that tells one model from another without reading all of its weights."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Final

import xxhash

_BLOCKS = 8
_BLOCK_BYTES = 4096

_LONGEST_HEADER = 100_000_000
"""What the safetensors format itself allows, in bytes."""

_OF_NO_CONSEQUENCE: Final = ("_name_or_path", "transformers_version")
"""Entries of a ``config.json`` that change whenever somebody writes it anew, and nothing of what the model computes."""


def weights_digest(model: str, revision: str | None = None) -> str:
    """xxh3-128 (hex) over the names, sizes and safetensors headers of a model's weight files, a few of their bytes, and
    its ``config.json``: the same weights under another rope scaling compute other states.

    ``model`` is a directory, or a Hub id whose files are in the local cache. Empty if neither is found. Two fine-tunes
    of one shape have equal names, sizes and headers: the bytes, :data:`_BLOCKS` small blocks spread over each file,
    tell them apart.
    """
    directory = _local_directory(model, revision)
    files = sorted(directory.glob("*.safetensors")) if directory else []
    if directory is None or not files:
        return ""
    digest = xxhash.xxh3_128(_config(directory).encode())
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update(_header(file))
        digest.update(_some_bytes(file))
    return digest.hexdigest()


def _local_directory(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    with contextlib.suppress(Exception):  # not cached, no such id, or no huggingface_hub here: unknown is an answer
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    return None


def with_overrides(digest: str, overrides: str) -> str:
    """The digest of the same files under other settings of the model; ``overrides`` is a JSON object.

    The digest as it is where nothing is overridden.
    """
    if overrides.strip() in ("", "{}"):
        return digest
    return xxhash.xxh3_128_hexdigest((digest + _canonical(overrides)).encode())


def _config(directory: Path) -> str:
    try:
        return _canonical((directory / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return ""


def _canonical(text: str) -> str:
    """JSON whose layout says nothing; a text that is none stays as it is."""
    try:
        content = json.loads(text)
    except ValueError:
        return text
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _OF_NO_CONSEQUENCE}
    return json.dumps(content, sort_keys=True)


def _header(file: Path) -> bytes:
    """The JSON header: 8 bytes of little-endian length, then the text."""
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            return start
        (length,) = struct.unpack("<Q", start)
        return stream.read(min(length, _LONGEST_HEADER))


def _some_bytes(file: Path) -> bytes:
    """Blocks at even distances, the last one at the end."""
    last = max(0, file.stat().st_size - _BLOCK_BYTES)
    blocks = []
    with file.open("rb") as stream:
        for number in range(1, _BLOCKS + 1):
            stream.seek(last * number // _BLOCKS)
            blocks.append(stream.read(_BLOCK_BYTES))
    return b"".join(blocks)
