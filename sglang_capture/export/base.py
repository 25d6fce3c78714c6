"""What an exporter is: a name, a check that refuses what would be silently wrong, and the export itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, Field

from sglang_capture.errors import CaptureError
from sglang_capture.shards import CaptureDataset
from sglang_capture.spec import CaptureSpec

Progress = Callable[[int, int], None]
"""Called with the samples done and the samples in all."""


class ExportError(CaptureError):
    """A dataset that a format cannot hold, or a folder that cannot be written; the message says what to do."""


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
    bytes: int = Field(description="size of the files of these samples")
    notes: list[str] = Field(description="what the user must know: conversions, and what to put into a draft's config")

    @property
    def complete(self) -> bool:
        """Whether every sample asked for is in the folder."""
        return not self.skipped


class Exporter(Protocol):
    """One trainer's format. A module of this package, and one entry in the registry (``__init__.py``)."""

    name: str
    description: str

    def check(self, spec: CaptureSpec) -> None:
        """Refuse captures that the trainer would read without complaint, and train wrongly on.

        Raises:
            ExportError: with the reason and the remedy.
        """

    def export(self, dataset: CaptureDataset, out: Path, rows: Sequence[int], progress: Progress) -> ExportSummary:
        """Write samples ``rows`` of ``dataset``, which passed :meth:`check`, below ``out``.

        Raises:
            ExportError: ``out`` cannot be written, or holds something else.
        """
