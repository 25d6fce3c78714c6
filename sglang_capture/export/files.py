"""Formats of one file a sample: what they share, so that a format is little more than its keys and shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import torch

from sglang_capture.dump import Dump
from sglang_capture.export.base import ExportSummary, Progress, SkippedSample, UnfitSampleError
from sglang_capture.export.final_norm import FinalNorm
from sglang_capture.export.folder import ExportFolder, FileRecord, Lineage, read_records
from sglang_capture.export.needs import POST, PRE, final_norm_for_post
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.parallel import in_parallel
from sglang_capture.export.samples import cut, mask_notes
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source, SourceError
from sglang_capture.spec import CaptureSpec

_FILES_A_FOLDER: Final = 2000


class Beside(NamedTuple):
    """Files beside the samples: by name, what ``torch.save`` is given; and what the user must know of them."""

    files: dict[str, Any]
    notes: list[str]


class FileExporter(ABC):
    """A format that keeps each sample in a file of its own, by default one of ``torch.save``.

    Attributes:
        options: see :class:`Exporter`. With ``model``, the last hidden state after the final norm is computed where
            the dataset holds only the one before it; with ``seq_length``, longer samples are cut.
        suffix: how the files' names end.
        folder: where the files go, below the export's folder.
    """

    name: str
    description: str
    options: frozenset[str] = frozenset()
    suffix: str = ".ckpt"
    folder: str = ""

    @abstractmethod
    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        """See :meth:`Exporter.check`."""

    @abstractmethod
    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the file of a :class:`CaptureDataset` sample; its ``metadata`` is what was kept beside it.

        Raises:
            UnfitSampleError: the trainer must not get it.
        """

    @abstractmethod
    def decode(self, content: Mapping[str, Any], sample_id: str, spec: CaptureSpec) -> Dump:
        """What the trainer sees in a file, as the dump it came from, so that ``verify`` can prove an export.

        ``spec`` is the dataset's; the dump's own says what the file holds of it.
        """

    @abstractmethod
    def notes(self, spec: CaptureSpec) -> list[str]:
        """What the user must know about an export of captures of ``spec``."""

    def save(self, content: dict[str, Any], sink: BinaryIO) -> None:
        """Write what :meth:`encode` gave."""
        torch.save(content, sink)

    def load(self, file: Path) -> Mapping[str, Any]:
        """Read it again; tensors may be views of the file's pages."""
        content: Mapping[str, Any] = torch.load(file, weights_only=True, mmap=True)
        return content

    def file_name(self, row: int) -> str:
        """Where sample number ``row`` of the dataset goes, below the export's folder: 2000 files a folder."""
        first = row - row % _FILES_A_FOLDER
        return f"{self.folder}rows_{first}-{first + _FILES_A_FOLDER}/data_{row}{self.suffix}"

    def beside(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> Beside:
        """What the trainer wants beside the samples, made from all of them."""
        return Beside({}, [])

    def export(
        self, dataset: CaptureDataset, out: Path, rows: Sequence[int], options: ExportOptions, progress: Progress
    ) -> ExportSummary:
        """See :meth:`Exporter.export`; files that are there and proven are kept."""
        norm = final_norm_for_post(dataset.spec, options)
        done, written, skipped, size = 0, 0, [], 0
        with ExportFolder(out, self.name, dataset, options) as folder:
            writer = _Writer(self, folder, dataset, norm, options.seq_length)
            for row, outcome in zip(rows, in_parallel(writer.write, rows), strict=True):
                if isinstance(outcome, SkippedSample):
                    skipped.append(outcome)
                    folder.remove(self.file_name(row))  # there may be one of what the dataset held before
                else:
                    record, new = outcome
                    size += record.bytes
                    if new:
                        folder.add(record)
                        written += 1
                done += 1
                progress(done, len(rows))
            beside = self.beside(dataset, rows, options)
            for name, content in beside.files.items():
                size += folder.write(name, "", partial(torch.save, content)).bytes
            summary = ExportSummary(
                format=self.name,
                dataset=str(dataset.path),
                out=str(out),
                samples=done - len(skipped),
                written=written,
                skipped=skipped,
                bytes=size,
                notes=[
                    *self.notes(dataset.spec),
                    *beside.notes,
                    *([norm.note] if norm else []),
                    *mask_notes(dataset, rows, options.seq_length),
                    *self._notes_of_others(folder, rows),
                ],
            )
            folder.finish(summary)
        return summary

    def _notes_of_others(self, folder: ExportFolder, rows: Sequence[int]) -> list[str]:
        """Samples of earlier runs stay in the folder, and a trainer takes all that is there."""
        others = len(folder.records.keys() - {self.file_name(row) for row in rows})
        if not others:
            return []
        return [f"samples of earlier runs that are in the folder too, and that the trainer reads along: {others}"]

    def read(self, out: Path, lineage: Lineage) -> Source:
        """See :meth:`Exporter.read`."""
        files = {record.sample_id: out / record.file for record in read_records(out).values()}

        def load(sample_id: str) -> Dump:
            file = files[sample_id]
            try:
                return self.decode(self.load(file), sample_id, lineage.spec)
            except Exception as error:  # whatever the reader and the tensors' shapes raise
                raise SourceError(f"{file} is not what was exported ({error}): run the export again") from error

        return Source(list(files), load)


@dataclass(frozen=True)
class _Writer:
    """Writes samples of a dataset, several at once."""

    exporter: FileExporter
    folder: ExportFolder
    dataset: CaptureDataset
    norm: FinalNorm | None
    seq_length: int | None

    def write(self, row: int) -> tuple[FileRecord, bool] | SkippedSample:
        """The record of a sample's file, and whether it was written now; or why there is none."""
        sample_id = self.dataset.ids[row]
        file, source = self.exporter.file_name(row), self.dataset.content_key(row)
        if record := self.folder.proven(file, sample_id, source):
            return record, False
        try:
            content = self.exporter.encode(self._sample(row))
        except UnfitSampleError as unfit:
            return SkippedSample(sample_id=sample_id, reason=str(unfit))
        return self.folder.write(file, sample_id, lambda sink: self.exporter.save(content, sink), source), True

    def _sample(self, row: int) -> dict[str, Any]:
        sample = cut(self.dataset[row], self.seq_length)
        if self.norm is not None:
            sample[POST] = self.norm(sample[PRE])
        return {**sample, "metadata": self.dataset.metadata(row)}
