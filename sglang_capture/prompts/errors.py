"""What is wrong with a row."""

from __future__ import annotations

from sglang_capture.errors import CaptureError


class RowError(CaptureError):
    """A row that cannot be captured; the others are not affected."""
