"""What is wrong with a row."""

from __future__ import annotations

from sglang_capture.errors import CaptureError


class RowError(CaptureError):
    """A row that cannot be captured; the others are not affected."""


class TooLong(RowError):  # noqa: N818
    """A row that cannot be cut to the length that was asked for: it is left out, as was asked."""
