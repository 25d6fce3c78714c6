"""What `check-draft` and `plan` read: a draft, and what a dataset or an export was captured with."""

from __future__ import annotations

from pathlib import Path

from sglang_capture.commands._model import read_config
from sglang_capture.drafts.configs import DraftConfig, draft_config
from sglang_capture.drafts.releases import NEWEST, release
from sglang_capture.drafts.shapes import read_shapes
from sglang_capture.drafts.trainers import TRAINERS, is_export, plain
from sglang_capture.errors import UsageError
from sglang_capture.export.folder import read_lineage
from sglang_capture.shards.manifest import read_manifest
from sglang_capture.spec import CaptureSpec


def read_draft(draft: str) -> DraftConfig:
    """The draft in a directory, or on the Hugging Face Hub (its config alone).

    Raises:
        UsageError: there is none, or it is no draft that is known.
    """
    directory = Path(draft)
    return draft_config(read_config(draft, "DRAFT"), read_shapes(directory) if directory.is_dir() else None)


def read_captured(path: Path) -> tuple[CaptureSpec, str]:
    """What a dataset was captured with, and the export's name if it is one for a trainer; else an empty name.

    Raises:
        DatasetError: it is neither.
        ExportError: its lineage cannot be read.
    """
    if (lineage := read_lineage(path)) is not None:
        return lineage.spec, lineage.format if is_export(lineage.format) else ""
    return read_manifest(path).spec, ""


def check_trainer(name: str | None) -> None:
    """Refuse a trainer that is not known.

    Raises:
        UsageError: with the names there are.
    """
    names = sorted({row.name for row in TRAINERS})
    if name is not None and plain(name) not in map(plain, names):
        raise UsageError(f"--trainer {name} is not known: give one of {', '.join(names)}")


def check_version(version: str | None) -> None:
    """Refuse what is no release number; one whose rules are not known is another matter.

    Raises:
        UsageError: it has no two numbers at its beginning.
    """
    if version is not None and len(release(version)) < 2:
        raise UsageError(f"--sglang-version must be a release number, for example {NEWEST}; found {version!r}")
