"""Whose spool it is: one server's processes share it, a second server is refused; and one side service reads it.

Every writing process holds a shared lock on ``<spool>/.lock`` for its life; the kernel gives it back when the process
dies, however it dies. Who gets the lock alone is the first of a new server: it clears what a dead one left half done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_capture.spool import FREE_DIRECTORY, PART_PREFIX, PROBE_PREFIX, TEMPORARY_SUFFIX, SpoolError, open_directory

LOCK_NAME = ".lock"
SERVICE_LOCK_NAME = ".service.lock"
_JOIN_SECONDS = 10.0


@dataclass
class Claim:
    """A held claim. Keep it: closing the file gives the spool back.

    Attributes:
        start: made up by the first of a server's processes, known to all of them: no two starts share it.
    """

    directory: Path
    first: bool
    descriptor: int
    start: str

    @property
    def held(self) -> bool:
        """Whether the directory is still the one that was claimed; it may have been moved away, or made anew."""
        return _is_at(self.directory / LOCK_NAME, self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


class ServiceClaim:
    """The side service's claim on the spool it empties: two would take each other's dumps.

    The directory may come later than the service, and may be made anew; each is claimed when it is first looked at.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / SERVICE_LOCK_NAME
        self._descriptor: int | None = None

    def hold(self) -> None:
        """Claim the directory, unless it is claimed already.

        Raises:
            SpoolError: there is none, it cannot be trusted, or another service reads there.
        """
        directory = open_directory(self._path.parent, create=False)
        if self._descriptor is not None and _is_at(self._path, self._descriptor):
            return
        self.close()
        try:
            descriptor = _open_lock(self._path)
        except OSError as error:
            raise SpoolError(f"the spool {directory} cannot be written: {error}") from error
        if not _lock(descriptor, fcntl.LOCK_EX):
            holder = _owner(descriptor).get("pid", "unknown")
            os.close(descriptor)
            raise SpoolError(
                f"another side service (process {holder}) reads the spool {directory}: stop it, or give each its own "
                "server's spool with --spool or SGLANG_CAPTURE_DIR"
            )
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # a full file system: then the holder has no name
            _write_over(self._path, {"pid": os.getpid()})

    def close(self) -> None:
        """Give the spool back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def service_on(directory: Path) -> str | None:
    """The process id of the side service that reads ``directory``, ``None`` if there is none."""
    try:
        descriptor = os.open(directory / SERVICE_LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _lock(descriptor, fcntl.LOCK_SH) else str(_owner(descriptor).get("pid", "unknown"))
    finally:
        os.close(descriptor)


def server_on(directory: Path) -> bool:
    """Whether a server that writes to ``directory`` is alive."""
    with contextlib.suppress(OSError), _alone(directory) as alone:
        return not alone
    return False


def clear_after_death(directory: Path) -> None:
    """Free what a server that is gone had under way, or kept for use. Nothing while one is alive."""
    with contextlib.suppress(OSError), _alone(directory) as alone:
        if alone:
            clear_parts(directory)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Whether nobody writes to ``directory``; inside, nobody can begin to. Raises OSError where nobody ever did."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def claim_spool(directory: Path, server_id: str) -> Claim:
    """Claim ``directory`` for the server ``server_id``; its other ranks join.

    Raises:
        SpoolError: another server writes there, or the directory cannot be trusted.
    """
    open_directory(directory)
    try:
        descriptor = _open_lock(directory / LOCK_NAME)
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
            start = uuid.uuid4().hex
            _write_over(directory / LOCK_NAME, {"server_id": server_id, "pid": os.getpid(), "start": start})
            # Turning the lock into a shared one is not atomic: the owner's name tells whether somebody came between.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _owner(descriptor).get("start") == start:
                return Claim(directory, True, descriptor, start)
        elif _lock(descriptor, fcntl.LOCK_SH):
            owner = _owner(descriptor)
            if owner.get("server_id") == server_id:
                return Claim(directory, False, descriptor, str(owner.get("start")))
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
    for pattern in (f"{PART_PREFIX}*", f".*{TEMPORARY_SUFFIX}", f"{PROBE_PREFIX}*", f"{FREE_DIRECTORY}/*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def _open_lock(path: Path) -> int:
    # Open for reading only: an open file for writing would keep the file system from being made read-only.
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


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


def _write_over(path: Path, owner: dict[str, object]) -> None:
    """Into the locked file itself: a new file by rename would not be the one that is locked."""
    with path.open("w") as file:
        json.dump(owner, file)
