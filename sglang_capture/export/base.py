"""What an exporter is: a name, a check that refuses what would be silently wrong, and the export itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, Field

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.export.options import ExportOptions
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source
from sglang_capture.spec import CaptureSpec

if TYPE_CHECKING:
    from sglang_capture.export.folder import Lineage

Progress = Callable[[int, int], None]
"""Called with the samples done and the samples in all."""


class ExportError(CaptureError):
    """A dataset that a format cannot hold, or a folder that cannot be written; the message says what to do."""


class ExportUsageError(ExportError, UsageError):
    """An option, a model or a folder that an export cannot take: what was asked for is wrong, not what was captured."""


class SkippedSample(BaseModel):
    """A sample that was left out, and why."""

    sample_id: str
    reason: str


class ExportSummary(BaseModel):
    """What an export did."""

    format: str
    dataset: str
    out: str
    samples: int = Field(description="samples asked for that are in the folder now, written before or in this run")
    written: int = Field(description="of these, written in this run; the others were there, and their content right")
    skipped: list[SkippedSample] = Field(description="samples left out")
    bytes: int = Field(description="size of the files of these samples, and of what lies beside them")
    notes: list[str] = Field(description="what the user must know: conversions, and what to put into a draft's config")

    @property
    def complete(self) -> bool:
        """Whether every sample asked for is in the folder."""
        return not self.skipped


class UnfitSampleError(Exception):
    """A sample that the trainer must not get; it is skipped, and the reason told."""


class Exporter(Protocol):
    """One trainer's format. A module of this package, and one entry in the registry (``__init__.py``).

    Attributes:
        name: as ``--to`` takes it.
        description: the trainer and the files, in a few words.
        options: the fields of :class:`ExportOptions` that the format takes; others are refused before it is asked.
    """

    name: str
    description: str
    options: frozenset[str]

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        """Refuse captures that the trainer would read without complaint, and train wrongly on.

        Raises:
            ExportError: with the reason and the remedy.
        """

    def export(
        self, dataset: CaptureDataset, out: Path, rows: Sequence[int], options: ExportOptions, progress: Progress
    ) -> ExportSummary:
        """Write samples ``rows`` of ``dataset``, which passed :meth:`check`, below ``out``.

        Raises:
            ExportError: ``out`` cannot be written, or holds something else.
        """

    def read(self, out: Path, lineage: Lineage) -> Source:
        """The samples that were written below ``out``, found and read as the trainer finds and reads them.

        Each comes back as a dump: the ids and rows of the files, in the places that the trainer takes them for, with a
        spec that says what the files hold of the dataset's. ``verify`` recomputes these.

        Raises:
            CaptureError: here or in ``load``: what is there cannot be read.
        """
