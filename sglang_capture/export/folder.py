"""The folder of an export: whose it is, and which of its files are proven good.

::

    <out>/sglang_capture_export.json    lineage: format, dataset, spec, what made the prompts; the last complete run
    <out>/sglang_capture_export.jsonl   one line for each file: name, sample id, its content, bytes, xxh3-64

A file counts as written when its line is there, says that it was made of what the dataset now holds, and its content
has that checksum; then a second run keeps it. Whatever else has its name (truncated, changed, of a crashed run, of a
dataset that was restored from an older copy since) is written again.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_capture.export.base import ExportError, ExportSummary, ExportUsageError
from sglang_capture.export.options import NO_OPTIONS, ExportOptions, flag
from sglang_capture.layers import output_of
from sglang_capture.shards import CaptureDataset
from sglang_capture.shards.check import checksum
from sglang_capture.spec import CaptureSpec

LINEAGE_NAME: Final = "sglang_capture_export.json"
RECORDS_NAME: Final = "sglang_capture_export.jsonl"
_TEMPORARY: Final = ".sglang_capture.tmp"

_NO_PLACE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""What the file system says of a path that can never be written as it stands."""


class Lineage(BaseModel):
    """Where the files of an export come from."""

    model_config = ConfigDict(extra="ignore")

    lineage_version: int = 1
    format: str
    options: ExportOptions = NO_OPTIONS
    dataset: str
    dataset_id: str
    spec_digest: str
    spec: CaptureSpec
    output_of_layer: list[int | None]
    """The layers in the trainers' usual convention: after this 0-based layer; ``None`` for the embeddings."""
    prompt_lineages: tuple[dict[str, Any], ...] = ()
    """The different ones of the dataset's samples: what made their ids and masks."""
    summary: ExportSummary | None = None
    """The last run that ended; ``None`` while the first one runs, or after it was killed."""


class FileRecord(BaseModel):
    """One file that was written whole.

    Attributes:
        content: what stands for the content that the file was made of (:meth:`CaptureDataset.content_key`).
        removed: it was taken away afterwards.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: str
    sample_id: str
    content: str = ""
    bytes: int
    xxh3_64: str
    removed: bool = False


class ExportFolder:
    """``out``, opened for the export of one dataset in one format; one process at a time.

    Raises:
        ExportUsageError: it holds something else, or is no place to write to.
        ExportError: another process exports into it, or the disk is full or fails.
    """

    def __init__(
        self, out: Path, format_name: str, dataset: CaptureDataset, options: ExportOptions = NO_OPTIONS
    ) -> None:
        self.out = out
        self._lineage = Lineage(
            format=format_name,
            options=options,
            dataset=str(dataset.path.resolve()),
            dataset_id=dataset.manifest.dataset_id,
            spec_digest=dataset.manifest.spec_digest,
            spec=dataset.spec,
            output_of_layer=list(output_of(dataset.spec.layers)),
            prompt_lineages=dataset.manifest.prompt_lineages,
        )
        try:
            _check_free_or_ours(out, self._lineage)
            out.mkdir(parents=True, exist_ok=True)
            self._log = (out / RECORDS_NAME).open("a+b")
        except OSError as error:
            raise _write_error(out, error) from error
        try:
            self._claim()
            self.records = read_records(out)
            self._write_lineage()
        except BaseException:
            self._log.close()
            raise

    def __enter__(self) -> ExportFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()

    def proven(self, file: str, sample_id: str, content: str = "") -> FileRecord | None:
        """The record of ``file`` if it was made of ``content``, for ``sample_id``, and holds what was written."""
        record = self.records.get(file)
        if record is None or (record.sample_id, record.content) != (sample_id, content):
            return None
        try:
            path = self.out / file
            same = path.stat().st_size == record.bytes and checksum(path) == record.xxh3_64
        except FileNotFoundError:
            return None
        return record if same else None

    def write(self, file: str, sample_id: str, save: Callable[[BinaryIO], None], content: str = "") -> FileRecord:
        """Write ``file`` under a temporary name with ``save``, and give it its name when it is whole.

        Raises:
            ExportError: the disk is full, or fails.
        """
        path = self.out / file
        temporary = path.with_name(f".{path.name}{_TEMPORARY}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _HashingFile(temporary) as written:
                save(written)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            if (fault := _disk_fault(error)) is None:
                raise
            raise _write_error(self.out, fault) from error
        return FileRecord(
            file=file,
            sample_id=sample_id,
            content=content,
            bytes=written.bytes,
            xxh3_64=written.digest.hexdigest(),
        )

    def add(self, record: FileRecord) -> None:
        """Remember a written file, so that the next run can prove it."""
        self._append(record)
        self.records[record.file] = record

    def remove(self, file: str) -> None:
        """Take ``file`` away if it is there; it counts as not written any more.

        Raises:
            ExportError: it cannot be removed.
        """
        try:
            (self.out / file).unlink(missing_ok=True)
        except OSError as error:
            raise _write_error(self.out, error) from error
        if record := self.records.pop(file, None):
            self._append(record.model_copy(update={"removed": True}))

    def finish(self, summary: ExportSummary) -> None:
        """Write down what the run did."""
        self._lineage.summary = summary
        self._write_lineage()

    def _append(self, record: FileRecord) -> None:
        try:
            self._log.write(record.model_dump_json(exclude_defaults=True).encode() + b"\n")
            self._log.flush()
        except OSError as error:
            raise _write_error(self.out, error) from error

    def _claim(self) -> None:
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ExportError(f"another process is exporting into {self.out}: wait for it to end") from None
        if self._log.seek(0, os.SEEK_END):
            self._log.seek(-1, os.SEEK_END)
            if self._log.read(1) != b"\n":  # a crash cut the last line off
                self._log.write(b"\n")
        for leftover in self.out.rglob(f".*{_TEMPORARY}"):
            leftover.unlink(missing_ok=True)

    def _write_lineage(self) -> None:
        temporary = self.out / f".{LINEAGE_NAME}{_TEMPORARY}"
        try:
            temporary.write_text(self._lineage.model_dump_json(indent=2) + "\n", encoding="utf-8")
            temporary.replace(self.out / LINEAGE_NAME)
        except OSError as error:
            raise _write_error(self.out, error) from error


def read_lineage(out: Path) -> Lineage | None:
    """The lineage of the export in ``out``, ``None`` if there is none.

    Raises:
        ExportError: it cannot be read.
    """
    path = out / LINEAGE_NAME
    try:
        return Lineage.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise ExportError(f"{path} cannot be read ({error}): export into an empty folder") from error


def read_records(out: Path) -> dict[str, FileRecord]:
    """The files of an export by name; a line that a crash cut off counts as no file."""
    records: dict[str, FileRecord] = {}
    try:
        lines = (out / RECORDS_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = FileRecord.model_validate_json(line)
        except ValidationError:
            continue
        records.pop(record.file, None)
        if not record.removed:
            records[record.file] = record
    return records


class _HashingFile(io.BufferedWriter):
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = xxhash.xxh3_64()
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return super().write(data)


def _check_free_or_ours(out: Path, lineage: Lineage) -> None:
    if out.exists() and not out.is_dir():
        raise ExportUsageError(f"{out} is no folder: give another one")
    found = read_lineage(out)
    if found is None:
        if out.exists() and any(not _is_ours(path) for path in out.iterdir()):
            raise ExportUsageError(
                f"{out} holds files that no export of ours wrote, and a trainer would read them along: "
                "give an empty folder"
            )
        return
    identity = ("format", "dataset_id", "spec_digest")
    if any(getattr(found, name) != getattr(lineage, name) for name in identity):
        raise ExportUsageError(
            f"{out} holds the {found.format} export of {found.dataset} (dataset {found.dataset_id}), "
            f"not the {lineage.format} export of {lineage.dataset} (dataset {lineage.dataset_id}): give another folder"
        )
    if found.options != lineage.options:
        raise ExportUsageError(
            f"{out} holds an export with {_options(found)}, and not with {_options(lineage)}: give the same options, "
            "or another folder"
        )


def _options(lineage: Lineage) -> str:
    given = lineage.options.given
    return " ".join(f"{flag(name)} {getattr(lineage.options, name)}" for name in sorted(given)) or "no options"


def _is_ours(path: Path) -> bool:
    """What an export leaves that was killed before it wrote its lineage."""
    return path.name == RECORDS_NAME or path.name.endswith(_TEMPORARY)


def _disk_fault(error: BaseException | None) -> OSError | None:
    """The disk's own error; ``torch.save`` covers it with one about positions in its zip file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _write_error(out: Path, error: OSError) -> ExportError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExportError(f"no room left in {out}: free some space and run the export again, it goes on from here")
    if error.errno in _NO_PLACE:
        return ExportUsageError(f"{out} cannot be written ({error}): give another folder")
    return ExportError(f"{out} cannot be written ({error})")
