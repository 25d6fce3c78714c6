"""What the metadata of a row may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_capture.dump import LABELS
from sglang_capture.nesting import MOST_LEVELS, too_deep
from sglang_capture.prompts.errors import RowError


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Check that metadata can be written as JSON by whatever writes it, and that its keys are not the labels' names.

    Raises:
        RowError: it is nested too deeply, or would be taken for a label of the capture.
    """
    if too_deep(metadata):
        raise RowError(f"metadata may have {MOST_LEVELS} objects and lists inside each other; found more: flatten it")
    if ours := [key for key in LABELS if key in metadata]:
        raise RowError(f"metadata may not say {ours[0]}: a sample's own label has that name; give yours another")
