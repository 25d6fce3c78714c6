"""A digest that tells one model from another without reading all of its weights."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final

import xxhash

_BLOCK_BYTES = 512
"""Read in the middle of each tensor: a fine-tune of a tensor touches these, and 100,000 of them are read in seconds."""

_READERS = 8
"""Files that are read at once: such small reads wait for the disk, not for the processor."""

_LONGEST_HEADER = 100_000_000
"""What the safetensors format itself allows, in bytes."""

_END_BYTES = 4 << 20
"""Of a zip archive, as ``torch.save`` writes it: its directory is at the end, some 100 bytes a tensor."""

_CONFIGS = ("config.json", "hf_quant_config.json")

_OF_NO_CONSEQUENCE: Final = ("_name_or_path", "transformers_version")
"""Entries of a ``config.json`` that change whenever somebody writes it anew, and nothing of what the model computes."""


def weights_digest(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """xxh3-128 (hex) over the names, sizes and safetensors headers of a model's weight files, 512 bytes of each of its
    tensors, and its ``config.json``: the same weights under another rope scaling compute other states.

    ``model`` is a directory, or a Hub id whose files are in the local cache. Empty if neither is found. Two fine-tunes
    of one shape have equal names, sizes and headers: the bytes tell them apart, if only one tensor is another. Of
    PyTorch's own files, where there are no others, it reads the ends, which hold a checksum of each tensor.

    Args:
        cache: where the Hub's files are kept, if not in the usual place.
    """
    directory = _local_directory(model, revision, cache)
    files = _files(directory) if directory else []
    if directory is None or not files:
        return ""
    digest = xxhash.xxh3_128()
    for name in _CONFIGS:
        digest.update(_config(directory / name).encode())
    for index in sorted(directory.glob("*.index.json")):  # which of several files are loaded
        digest.update(_config(index).encode())
    with ThreadPoolExecutor(_READERS) as readers:
        for file, content in zip(files, readers.map(_content, files), strict=True):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(content)
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    """The weights, as SGLang looks for them: safetensors, else PyTorch's own."""
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        if found := sorted(directory.glob(pattern)):
            return found
    return []


def _local_directory(model: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    with contextlib.suppress(Exception):  # not cached, no such id, or no huggingface_hub here: unknown is an answer
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    return None


def with_overrides(digest: str, overrides: str) -> str:
    """The digest of the same files under other settings of the model; ``overrides`` is a JSON object.

    The digest as it is where nothing is overridden.
    """
    if overrides.strip() in ("", "{}"):
        return digest
    return xxhash.xxh3_128_hexdigest((digest + _canonical(overrides)).encode())


def _config(path: Path) -> str:
    try:
        return _canonical(path.read_text(encoding="utf-8"))
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


def _content(file: Path) -> bytes:
    """What tells this file from another: its header, and a digest of a block of each tensor."""
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            stream.seek(-min(_END_BYTES, file.stat().st_size), os.SEEK_END)
            return stream.read()
        header = _header(stream)
        descriptor, start = stream.fileno(), 8 + len(header)
        blocks = xxhash.xxh3_128()
        for begin, end in _tensors(header):
            middle = max(begin, (begin + end - _BLOCK_BYTES) // 2)
            blocks.update(os.pread(descriptor, min(_BLOCK_BYTES, end - middle), start + middle))
    return header + blocks.digest()


def _header(stream: BinaryIO) -> bytes:
    """The JSON header: 8 bytes of little-endian length, then the text."""
    (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
    return stream.read(min(length, _LONGEST_HEADER))


def _tensors(header: bytes) -> Iterator[tuple[int, int]]:
    """Where each tensor's bytes begin and end, counted from the header's end, as they lie in the file.

    None of a header that is no safetensors header: whoever loads such a file will say so.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        yield from sorted((int(begin), int(end)) for begin, end in (e["data_offsets"] for e in entries.values()))
