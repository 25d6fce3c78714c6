"""Is a dataset whole? Every shard against the manifest, and, if asked, every byte against its checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

from sglang_capture.shards.layout import LOST, shard_tensors
from sglang_capture.shards.manifest import DatasetError, Manifest, read_manifest
from sglang_capture.shards.reader import Shard

_CHUNK: Final = 4 << 20


def check_dataset(path: Path, *, deep: bool = False) -> Manifest:
    """Check that each shard is there, has its size, and holds what the manifest says.

    Args:
        path: the dataset.
        deep: also read every byte and compare the checksums: as long as reading the dataset takes.

    Raises:
        DatasetError: with one line for every fault found, each naming its file and what to do.
    """
    manifest = read_manifest(path)
    faults: list[str] = []
    for entry in manifest.shards:
        try:
            shard = Shard(path, entry)
            _check_content(shard, manifest)
            if deep:
                _check_sum(shard)
        except DatasetError as fault:
            faults.append(str(fault))
    if faults:
        raise DatasetError("\n".join(faults))
    return manifest


def checksum(path: Path) -> str:
    """The xxh3-64 of a file, in hex."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_content(shard: Shard, manifest: Manifest) -> None:
    entry, layout = shard.entry, shard.layout
    if layout.metadata.get("spec_digest") != manifest.spec_digest:
        raise DatasetError(f"{shard.path} was written for another spec than the manifest's: {LOST}")
    expected = shard_tensors(manifest.spec, entry.samples, entry.tokens)
    found = {name: (place.dtype, place.shape) for name, place in layout.tensors.items()}
    if found != expected:
        raise DatasetError(f"{shard.path} holds the tensors {found}, expected {expected}: {LOST}")
    offsets = shard.offsets
    if int(offsets[0]) != 0 or int(offsets[-1]) != entry.tokens or not bool((offsets.diff() > 0).all()):
        raise DatasetError(f"the offsets of {shard.path} do not divide its {entry.tokens:,} rows into samples: {LOST}")
    if len(shard.ids) != entry.samples:
        raise DatasetError(f"{shard.path} names {len(shard.ids)} sample ids, expected {entry.samples}: {LOST}")


def _check_sum(shard: Shard) -> None:
    found = checksum(shard.path)
    if found != shard.entry.xxh3_64:
        raise DatasetError(
            f"{shard.path} was damaged since it was written (expected xxh3-64 {shard.entry.xxh3_64}, found {found}): "
            f"{LOST}"
        )
