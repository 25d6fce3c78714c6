"""Reading a small file that others may have put there: never for ever, and never without end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 1 << 20
"""Far more than any status or failure has."""


def read_small(path: Path) -> bytes:
    """The content of a regular file of at most :data:`MOST_BYTES`; a pipe, a device or a link is not opened for long.

    Raises:
        OSError: it is not there, no regular file, larger, or cannot be read.
    """
    # Without O_NONBLOCK, to open a pipe waits until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(f"{path} has more than {MOST_BYTES} bytes")
    return content
