"""Libraries of the extra ``export``: imported when a format that needs one is used, not before."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_capture.export.base import ExportError


def need_library(name: str, format_name: str) -> Any:
    """The module ``name``.

    Raises:
        ExportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExportError(
            f"--to {format_name} needs the library {name} ({error}): pip install 'sglang-capture[export]'"
        ) from error
