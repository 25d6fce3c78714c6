"""Dumps into shards: one pass over the rows, one copy of each, and nothing half-written in sight.

A shard is written to a temporary name, opened again and checked, renamed, and only then named by the manifest. Dying at
any of these steps leaves files that no reader looks at; the next writer removes them.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from sglang_capture.shards.layout import build_header, read_layout, shard_tensors
from sglang_capture.shards.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    DatasetError,
    Manifest,
    ShardEntry,
    SpecMismatch,
    distinct,
    read_manifest,
    sync_directory,
    write_manifest,
)
from sglang_capture.shards.sample import Sample, SampleError, check_sample
from sglang_capture.spec import PROMPT_LINEAGE, CaptureSpec

LOCK_NAME: Final = ".lock"
_CHUNK: Final = 256 << 10
"""Bytes hashed and then written at a time: small enough to be still in the cache when they are written."""
_BUFFER: Final = 64 << 10
"""What gathers small writes (ids, masks); a chunk, being larger, goes past it without a copy."""
_FLUSH: Final = 32 << 20
"""Bytes after which the disk is set to work, so that it writes while the next rows are hashed and copied."""
_SHARD_FILE: Final = re.compile(r"shard-\d{6,}\.safetensors|\.shard-\d{6,}\.safetensors\.tmp|\.manifest\.json\.tmp")


class DatasetWriter:
    """The one writer of a dataset: makes it, or appends to it.

    Opening removes what a crashed writer left: temporary files, and shards that the manifest does not name.

    Raises:
        SpecMismatch: the dataset holds captures of another spec.
        DatasetError: another process writes it, or the directory cannot be used.
    """

    def __init__(self, directory: Path, spec: CaptureSpec) -> None:
        self.directory = directory
        self._lock = _lock(directory)
        try:
            self.manifest = self._open(spec)
            self._remove_leftovers()
            self._places = self._read_ids()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next writer in."""
        self._lock.close()

    def shard_of(self, sample_id: str) -> str | None:
        """The file that holds a sample, ``None`` if the dataset does not have it."""
        return self._places.get(sample_id)

    def write_shard(self, samples: Iterable[Sample]) -> ShardEntry:
        """Write one shard and name it in the manifest; when this returns, its dumps may be freed.

        Every sample is checked before the first byte is written.

        Raises:
            SampleError, SpecMismatch: see :func:`check_sample`; also a sample id that the dataset already has.
            DatasetError: the disk is full or fails. In each case the dataset is as it was.
        """
        batch = list(samples)
        self._check(batch)
        spec = self.manifest.spec
        name = self._next_name()
        path, temporary = self.directory / name, self.directory / f".{name}.tmp"
        tokens = sum(sample.dump.tokens for sample in batch)
        header, size = build_header(shard_tensors(spec, len(batch), tokens), self._metadata(batch))
        try:
            digest = _write(temporary, size, itertools.chain([memoryview(header)], _buffers(batch, spec)))
            _check_written(temporary, spec, batch, tokens)
            temporary.rename(path)
            sync_directory(self.directory)
            found = (sample.metadata.get(PROMPT_LINEAGE) for sample in batch)
            lineages = distinct(lineage for lineage in found if isinstance(lineage, dict))
            entry = ShardEntry(
                file=name, bytes=size, samples=len(batch), tokens=tokens, xxh3_64=digest, prompt_lineages=lineages
            )
            manifest = self.manifest.with_shard(entry)
            write_manifest(self.directory, manifest)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _write_error(self.directory, size, error) from error
            raise
        self.manifest = manifest
        self._places.update((sample.sample_id, name) for sample in batch)
        sync_directory(self.directory)
        return entry

    def _open(self, spec: CaptureSpec) -> Manifest:
        if not (self.directory / MANIFEST_NAME).exists():
            return self._create(spec)
        manifest = read_manifest(self.directory)
        if differences := manifest.spec.differences(spec):
            raise SpecMismatch(
                f"{self.directory} holds captures of another spec ({'; '.join(differences)}, the dataset's first): "
                "write to another directory"
            )
        return manifest

    def _create(self, spec: CaptureSpec) -> Manifest:
        if stray := next(self.directory.glob("shard-*.safetensors"), None):
            raise DatasetError(
                f"{self.directory} holds {stray.name} but no {MANIFEST_NAME}: restore the manifest, "
                "or write to another directory"
            )
        manifest = Manifest.new(spec)
        try:
            write_manifest(self.directory, manifest)
        except OSError as error:
            raise _write_error(self.directory, 0, error) from error
        return manifest

    def _remove_leftovers(self) -> None:
        named = {shard.file for shard in self.manifest.shards}
        for path in self.directory.iterdir():
            if _SHARD_FILE.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)

    def _read_ids(self) -> dict[str, str]:
        return {
            sample_id: shard.file
            for shard in self.manifest.shards
            for sample_id in json.loads(read_layout(self.directory / shard.file).metadata["sample_ids"])
        }

    def _check(self, batch: Sequence[Sample]) -> None:
        if not batch:
            raise DatasetError("a shard needs at least one sample; found none")
        seen: set[str] = set()
        for sample in batch:
            check_sample(sample, self.manifest.spec)
            if sample.sample_id in self._places or sample.sample_id in seen:
                where = self._places.get(sample.sample_id, "this shard")
                raise SampleError(f"sample {sample.sample_id} is already in {where}: an id may stand in a dataset once")
            seen.add(sample.sample_id)

    def _next_name(self) -> str:
        numbers = (int(shard.file[6 : -len(".safetensors")]) for shard in self.manifest.shards)
        return f"shard-{max(numbers, default=-1) + 1:06d}.safetensors"

    def _metadata(self, batch: Sequence[Sample]) -> dict[str, str]:
        metadata = {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "spec_digest": self.manifest.spec_digest,
            "spec": batch[0].dump.spec.to_json(),
            "sample_ids": json.dumps([sample.sample_id for sample in batch]),
        }
        described = [sample.description for sample in batch]
        if any(described):
            metadata["sample_metadata"] = json.dumps(described)
        return metadata


def _lock(directory: Path) -> BinaryIO:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK_NAME).open("ab")
    except OSError as error:
        raise DatasetError(f"{directory} cannot be written: {error.strerror}; give another directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise DatasetError(
            f"another process is writing {directory}: wait for it to end, or write to another directory"
        ) from None
    return lock


def _buffers(batch: Sequence[Sample], spec: CaptureSpec) -> Iterator[memoryview]:
    """The bytes of the tensors in the order of :func:`shard_tensors`; rows are views of the mapped dumps."""
    lengths = torch.tensor([0, *(sample.dump.tokens for sample in batch)])
    yield _bytes(lengths.cumsum(0))
    yield from (_bytes(sample.dump.input_ids) for sample in batch)
    yield from (_bytes(sample.dump.hidden_states) for sample in batch)
    for key in spec.last_hidden_keys:
        yield from (_bytes(sample.dump.last_hidden[key]) for sample in batch)
    yield from (_bytes(_mask(sample)) for sample in batch)


def _mask(sample: Sample) -> torch.Tensor:
    if sample.loss_mask is None:
        return torch.ones(sample.dump.tokens, dtype=torch.uint8)
    return sample.loss_mask.to(torch.uint8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def _write(path: Path, size: int, buffers: Iterable[memoryview]) -> str:
    """Write ``buffers`` durably and return the xxh3-64 of the file, hashed on the way.

    The room is reserved first: a full disk is told before anything was copied, and writing into reserved blocks is
    a quarter cheaper.

    Raises:
        OSError: the disk is full, or fails.
    """
    digest = xxhash.xxh3_64()
    flushed = 0
    with path.open("wb", buffering=_BUFFER) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        for chunk in _chunks(buffers):
            digest.update(chunk)
            file.write(chunk)
            if (end := file.tell()) - flushed >= _FLUSH:
                _start_flush(file.fileno(), flushed, end)
                flushed = end
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _chunks(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """The buffers in pieces that end where the file has a multiple of the chunk.

    Between them no page is written by halves, and the kernel takes its pages by the dozen: a fifth cheaper.
    """
    position = 0
    for buffer in buffers:
        begin = 0
        while begin < len(buffer):
            end = min(begin + _CHUNK - position % _CHUNK, len(buffer))
            yield buffer[begin:end]
            position, begin = position + end - begin, end


def _start_flush(descriptor: int, begin: int, end: int) -> None:
    """Have the kernel begin to write out what was written, without waiting for it.

    Of pages that are still to be written, this advice drops none: it only starts their way to the disk, and the shard
    stays in memory for who reads it next. An error of the disk is left for the ``fsync`` at the end, which an
    ``fdatasync`` on another thread would take away from it.
    """
    os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _check_written(path: Path, spec: CaptureSpec, batch: Sequence[Sample], tokens: int) -> None:
    """Open what was written as any safetensors reader would, before it gets its name.

    Raises:
        OSError: the file does not hold what was meant; the disk, or something that shares it, is at fault.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            offsets = file.get_tensor("offsets")
    except SafetensorError as error:
        raise OSError(errno.EIO, f"the shard just written cannot be opened: {error}") from error
    expected = {name: shape for name, (_, shape) in shard_tensors(spec, len(batch), tokens).items()}
    if found != expected or int(offsets[-1]) != tokens:
        raise OSError(errno.EIO, f"the shard just written holds {found}, expected {expected}")


def _write_error(directory: Path, size: int, error: OSError) -> DatasetError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DatasetError(
            f"no room for a shard of {size:,} bytes in {directory} ({error.strerror}): free some space and pack again; "
            "the dataset is unchanged"
        )
    return DatasetError(f"{directory} cannot be written ({error}); the dataset is unchanged")
