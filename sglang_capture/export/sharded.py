"""Formats whose files are numbered without holes, and that keep something beside them: a table, a manifest, weights.

The folder holds the samples of the last run, in the order of the dataset, and no others: a file that belongs to none of
them (other ids were asked for before) is removed. What a run does:

1. The *seal* is removed: the file without which the trainer refuses the folder. Until the run ends well, there is none.
2. Samples that no trainer must get are left out, so the numbers depend on which: they are given as the samples come.
3. Each numbered file is kept if it is proven to hold the same samples, and written if not.
4. What stands beside them is made anew, for it cannot be appended to, and the seal comes last.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from sglang_capture.export.base import ExportError, ExportSummary, Progress, SkippedSample, UnfitSampleError
from sglang_capture.export.folder import ExportFolder, FileRecord, Lineage
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.parallel import in_parallel
from sglang_capture.export.samples import mask_notes
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source
from sglang_capture.spec import CaptureSpec


class ShardJob(ABC):
    """One run of one format: what it was made with, and how it writes.

    Attributes:
        samples_a_file, bytes_a_file: a file is full with so many samples, or when their captures are so large.
        identity: what the files depend on beside their samples; with another one they are written again.
    """

    samples_a_file: int = 1 << 62
    bytes_a_file: int = 1 << 62
    identity: str = ""

    @abstractmethod
    def file_name(self, number: int) -> str:
        """Where file ``number``, counted from 0, goes below the folder."""

    @abstractmethod
    def check_sample(self, sample: Mapping[str, Any]) -> None:
        """Look at a sample before it gets a place.

        Raises:
            UnfitSampleError: the trainer must not get it.
        """

    @abstractmethod
    def write(self, sink: BinaryIO, rows: Sequence[int]) -> None:
        """Write the file of samples ``rows`` of the dataset, all of which passed :meth:`check_sample`."""

    @abstractmethod
    def write_beside(self, done: Written) -> list[str]:
        """Write what stands beside the numbered files, the seal last; returns notes for the user."""


@dataclass
class Written:
    """What a run has written or kept so far, and how to put further files beside the numbered ones.

    Attributes:
        rows: the samples that are in the files, as numbered in the dataset.
        files: the names of the numbered files, in order.
        records: of all files of this run.
    """

    folder: ExportFolder
    rows: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    records: dict[str, FileRecord] = field(default_factory=dict)
    written: int = 0

    def put(self, file: str, what: str, save: Callable[[BinaryIO], None]) -> None:
        """Have ``save`` write ``file``, unless it is there and proven to be ``what``; an empty ``what`` is never."""
        record = self.folder.proven(file, what) if what else None
        if record is None:
            record = self.folder.write(file, what, save)
            self.folder.add(record)
        self.records[file] = record

    def put_json(self, file: str, content: Any) -> None:
        """Write ``content`` as ``file``, always anew."""
        self.put(file, "", lambda sink: _write_json(sink, content))

    def add(self, rows: Sequence[int], record: FileRecord, *, new: bool) -> None:
        """Count a numbered file."""
        if new:
            self.folder.add(record)
            self.written += len(rows)
        self.rows += rows
        self.files.append(record.file)
        self.records[record.file] = record


class ShardedExporter(ABC):
    """A format of numbered files; see the module."""

    name: str
    description: str
    options: frozenset[str]
    seal: str | None
    """The file without which the trainer refuses the folder; ``None`` if it takes any."""

    @abstractmethod
    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        """See :meth:`Exporter.check`."""

    @abstractmethod
    def start(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> ShardJob:
        """A run over samples ``rows``.

        Raises:
            ExportError: something it needs is not there.
        """

    @abstractmethod
    def read(self, out: Path, lineage: Lineage) -> Source:
        """See :meth:`Exporter.read`."""

    def export(
        self, dataset: CaptureDataset, out: Path, rows: Sequence[int], options: ExportOptions, progress: Progress
    ) -> ExportSummary:
        """See :meth:`Exporter.export`."""
        job = self.start(dataset, rows, options)
        with ExportFolder(out, self.name, dataset, options) as folder:
            if self.seal:
                folder.remove(self.seal)
            done = Written(folder)
            skipped: list[SkippedSample] = []
            numbered = enumerate(_batches(job, _fit(job, dataset, rows, skipped)))
            for batch, record, new in in_parallel(lambda item: _write(job, folder, dataset, *item), numbered):
                done.add(batch, record, new=new)
                progress(len(done.rows) + len(skipped), len(rows))
            if not done.rows:
                raise ExportError(f"no sample is fit for {self.name}; the first: {skipped[0].reason}")
            notes = job.write_beside(done)
            for file in set(folder.records) - set(done.records):
                folder.remove(file)
            summary = ExportSummary(
                format=self.name,
                dataset=str(dataset.path),
                out=str(out),
                samples=len(done.rows),
                written=done.written,
                skipped=skipped,
                bytes=sum(record.bytes for record in done.records.values()),
                notes=[*notes, *mask_notes(dataset, rows, options.seq_length)],
            )
            folder.finish(summary)
        return summary


def _write_json(sink: BinaryIO, content: Any) -> None:
    sink.write(json.dumps(content, indent=2).encode())


def _fit(
    job: ShardJob, dataset: CaptureDataset, rows: Sequence[int], skipped: list[SkippedSample]
) -> Iterator[tuple[int, int]]:
    """The samples that may be written, with the bytes of each; the others go to ``skipped``."""

    def look(row: int) -> tuple[int, int] | SkippedSample:
        sample = dataset[row]
        try:
            job.check_sample(sample)
        except UnfitSampleError as unfit:
            return SkippedSample(sample_id=dataset.ids[row], reason=str(unfit))
        return row, len(sample["input_ids"]) * dataset.spec.bytes_per_token

    for outcome in in_parallel(look, rows):
        if isinstance(outcome, SkippedSample):
            skipped.append(outcome)
        else:
            yield outcome


def _batches(job: ShardJob, fit: Iterator[tuple[int, int]]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for row, row_bytes in fit:
        batch.append(row)
        size += row_bytes
        if len(batch) >= job.samples_a_file or size >= job.bytes_a_file:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(
    job: ShardJob, folder: ExportFolder, dataset: CaptureDataset, number: int, rows: list[int]
) -> tuple[list[int], FileRecord, bool]:
    file, what = job.file_name(number), _identity(job, [dataset.ids[row] for row in rows])
    content = _joint([dataset.content_key(row) for row in rows])
    if record := folder.proven(file, what, content):
        return rows, record, False
    return rows, folder.write(file, what, lambda sink: job.write(sink, rows), content), True


def _identity(job: ShardJob, ids: list[str]) -> str:
    """What a record says of its file: the sample's id, or how many samples and a digest of their ids."""
    if job.samples_a_file == 1 and not job.identity:
        return ids[0]
    return f"{len(ids)} samples, {_joint([job.identity, *ids])}"


def _joint(names: list[str]) -> str:
    """One short name for several."""
    return xxhash.xxh3_64_hexdigest("\n".join(names).encode())
