"""Formats of one file a sample: what they share, so that a format is little more than its keys and shapes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from sglang_capture.dump import Dump
from sglang_capture.export.base import ExportSummary, Progress, SkippedSample
from sglang_capture.export.folder import ExportFolder, FileRecord
from sglang_capture.shards import CaptureDataset
from sglang_capture.spec import CaptureSpec

_THREADS: Final = min(4, os.cpu_count() or 1)
"""Samples written at once: what bounds the memory an export takes."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class UnfitSampleError(Exception):
    """A sample that the trainer must not get; it is skipped, and the reason told."""


class FileExporter(ABC):
    """A format that keeps each sample in a ``torch.save`` file of its own."""

    name: str
    description: str

    @abstractmethod
    def check(self, spec: CaptureSpec) -> None:
        """See :meth:`Exporter.check`."""

    @abstractmethod
    def file_name(self, row: int, sample_id: str) -> str:
        """Where sample number ``row`` of the dataset goes, below the folder."""

    @abstractmethod
    def encode(self, sample: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The content of the file of a :class:`CaptureDataset` sample.

        Raises:
            UnfitSampleError: the trainer must not get it.
        """

    @abstractmethod
    def decode(self, content: Mapping[str, torch.Tensor], sample_id: str, spec: CaptureSpec) -> Dump:
        """What :meth:`encode` wrote, as the dump it came from, so that ``verify`` can prove an export.

        ``spec`` is the dataset's; the dump's own says what the file holds of it.
        """

    @abstractmethod
    def notes(self, spec: CaptureSpec) -> list[str]:
        """What the user must know about an export of captures of ``spec``."""

    def export(self, dataset: CaptureDataset, out: Path, rows: Sequence[int], progress: Progress) -> ExportSummary:
        """See :meth:`Exporter.export`; files that are there and proven are kept."""
        done, written, skipped, size = 0, 0, [], 0
        with ExportFolder(out, self.name, dataset) as folder:

            def export_one(row: int) -> tuple[FileRecord, bool] | SkippedSample:
                return self._export_one(folder, dataset, row)

            for outcome in _in_parallel(export_one, rows):
                if isinstance(outcome, SkippedSample):
                    skipped.append(outcome)
                else:
                    record, new = outcome
                    size += record.bytes
                    if new:
                        folder.add(record)
                        written += 1
                done += 1
                progress(done, len(rows))
            summary = ExportSummary(
                format=self.name,
                dataset=str(dataset.path),
                out=str(out),
                samples=done - len(skipped),
                written=written,
                skipped=skipped,
                bytes=size,
                notes=[*self.notes(dataset.spec), *_mask_notes(dataset, rows)],
            )
            folder.finish(summary)
        return summary

    def _export_one(
        self, folder: ExportFolder, dataset: CaptureDataset, row: int
    ) -> tuple[FileRecord, bool] | SkippedSample:
        sample_id = dataset.ids[row]
        file = self.file_name(row, sample_id)
        if record := folder.proven(file, sample_id):
            return record, False
        try:
            content = self.encode(dataset[row])
        except UnfitSampleError as unfit:
            return SkippedSample(sample_id=sample_id, reason=str(unfit))
        return folder.write(file, sample_id, lambda sink: torch.save(content, sink)), True


def _mask_notes(dataset: CaptureDataset, rows: Sequence[int]) -> list[str]:
    """A mask of all ones is right for plain text and wrong for a conversation: nobody but the user can tell."""
    ones = sum(bool(dataset[row]["loss_mask"].all()) for row in rows)
    if not ones:
        return []
    return [
        f"{ones} of {len(rows)} samples have a loss mask of all ones, so every token of them is trained: as is usual "
        "for prompts, input_ids without a mask, and requests that were marked by hand (--ids chooses samples)"
    ]


def as_bfloat16(name: str, rows: torch.Tensor) -> torch.Tensor:
    """``rows`` in bfloat16, all finite, in a storage of their own size (``torch.save`` writes the whole storage).

    Raises:
        UnfitSampleError: a row holds NaN or Inf, by itself or in bfloat16; ``name`` is told with the row.
    """
    converted = rows.to(torch.bfloat16)
    lowest, highest = torch.aminmax(converted)
    if not (lowest.isfinite() and highest.isfinite()):
        first = int(converted.flatten(1).isfinite().all(dim=1).int().argmin())
        raise UnfitSampleError(f"{name} holds NaN or Inf, first in row {first}")
    return converted if converted.untyped_storage().nbytes() == converted.nbytes else converted.clone()


def _in_parallel(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results of ``work`` in order, with a bounded number of items under way; the first exception ends it."""
    with ThreadPoolExecutor(_THREADS) as pool:
        pending: deque[Future[_Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 2 * _THREADS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
