"""Whose spool it is: one server's processes share it, a second server is refused.

Every writing process holds a shared lock on ``<spool>/.lock`` for its life; the kernel gives it back when the process
dies, however it dies. Who gets the lock alone is the first of a new server: it clears what a dead one left half done.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from sglang_capture.spool import PART_PREFIX, PROBE_PREFIX, TEMPORARY_SUFFIX, SpoolError, open_directory

LOCK_NAME = ".lock"
_JOIN_SECONDS = 10.0


@dataclass
class Claim:
    """A held claim. Keep it: closing the file gives the spool back."""

    directory: Path
    first: bool
    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)


def claim_spool(directory: Path, server_id: str) -> Claim:
    """Claim ``directory`` for the server ``server_id``; its other ranks join.

    Raises:
        SpoolError: another server writes there, or the directory cannot be trusted.
    """
    open_directory(directory)
    try:
        # Open for reading only: an open file for writing would keep the file system from being made read-only.
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SpoolError(f"the spool {directory} cannot be written: {error}") from error
    try:
        return _claim(directory, descriptor, server_id)
    except BaseException:
        os.close(descriptor)
        raise


def _claim(directory: Path, descriptor: int, server_id: str) -> Claim:
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        if _lock(descriptor, fcntl.LOCK_EX):
            clear_parts(directory)
            _write_owner(directory, server_id)
            # Turning the lock into a shared one is not atomic: the owner's name tells whether somebody came between.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _owner(descriptor).get("server_id") == server_id:
                return Claim(directory, True, descriptor)
        elif _lock(descriptor, fcntl.LOCK_SH):
            owner = _owner(descriptor)
            if owner.get("server_id") == server_id:
                return Claim(directory, False, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            if owner:
                raise SpoolError(
                    f"another server (process {owner.get('pid')}) writes to the spool {directory}: "
                    "give each server its own with SGLANG_CAPTURE_DIR"
                )
        if time.monotonic() > deadline:
            raise SpoolError(f"the lock {directory / LOCK_NAME} could not be had within {_JOIN_SECONDS:.0f} s")
        time.sleep(0.02)


def clear_parts(directory: Path) -> None:
    """Remove the unfinished files of dead processes, and probes left behind; only for who holds the lock alone."""
    for pattern in (f"{PART_PREFIX}*", f".*{TEMPORARY_SUFFIX}", f"{PROBE_PREFIX}*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write_owner(directory: Path, server_id: str) -> None:
    """Into the locked file itself: a new file by rename would not be the one that is locked."""
    with (directory / LOCK_NAME).open("w") as file:
        json.dump({"server_id": server_id, "pid": os.getpid()}, file)
