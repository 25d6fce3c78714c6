"""The spool: the directory under ``/dev/shm`` with the dumps of one server, its quota and its status.

::

    <spool>/<capture_id>.pt            a complete dump; the name appears by one atomic link, never before
    <spool>/<capture_id>.failed.json   why a marked request has no dump
    <spool>/sglang-capture-probe-….pt  a look at the server by `doctor` or `verify`, which also removes it
    <spool>/status.json                what the plugin is doing; status-<rank>.json for each rank
    <spool>/.part-…                    a dump being filled; removed at the next start if its process died
    <spool>/.free/                     dumps whose pages were handed back; .part-…-idle-… waits to be filled again
    <spool>/.….tmp                     a small file on its way to its name; removed likewise
    <spool>/.lock                      held by the processes of the one server that writes here
    <spool>/.service.lock              held by the one side service that reads here

The plugin writes, the side service reads and removes. A dump belongs to the spool until it is packed or deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_capture.mark import is_capture_id
from sglang_capture.small_files import read_small

DEFAULT_DIRECTORY = Path("/dev/shm/sglang_capture")
DUMP_SUFFIX = ".pt"
FAILED_SUFFIX = ".failed.json"
PART_PREFIX = ".part-"
FREE_DIRECTORY = ".free"
TEMPORARY_SUFFIX = ".tmp"
"""Of a small file on its way to its name."""
PROBE_PREFIX = "sglang-capture-probe-"
"""Of the ids of captures that are made for a look at the server, and removed at once; they are nobody's data."""
PROBE_SECONDS = 600.0
"""A probe this old belongs to nobody who still looks."""
STATUS_NAME = "status.json"
STATUS_STALE_SECONDS = 10.0
"""A running plugin writes its status every second; one this old belongs to a server that stopped or hangs."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})
"""What a file system says that is full."""

SPOOL_FULL = "spool full"
"""The reason of a capture refused for want of room: the one failure that trying again later mends."""


class SpoolError(RuntimeError):
    """The spool's directory cannot be used; the message says what to do."""


class Failure(BaseModel):
    """The content of ``<capture_id>.failed.json``."""

    model_config = ConfigDict(extra="ignore")

    capture_id: str
    request_id: str = ""
    kind: Literal["refused", "failed"] = Field(description="refused before the first row, or failed on the way")
    reason: str
    retriable: bool = Field(default=False, description="whether the same request may succeed later (spool full)")
    time: float = Field(description="seconds since the epoch")


class Counts(BaseModel):
    """What one rank (or, summed, one server) did since it started."""

    marked: int = Field(default=0, description="marked requests seen")
    published: int = Field(default=0, description="dumps published")
    failed: int = Field(default=0, description="captures that failed on the way (aborted requests among them)")
    refused: int = Field(default=0, description="captures refused: bad mark, spool full, unsupported request")
    duplicates: int = Field(default=0, description="captures of an id that was published already")
    reused: int = Field(default=0, description="captures laid out in the pages of a dump that was handed back")
    tokens: int = Field(default=0, description="rows in published dumps")
    bytes: int = Field(default=0, description="payload bytes in published dumps")
    nonfinite_rows: int = Field(default=0, description="tokens with NaN or Inf in published dumps")
    zero_rows: int = Field(default=0, description="tokens with a row of zeros only in published dumps")
    copies: int = Field(default=0, description="copies of rows made; 0 while nothing is marked")
    forwards: int = Field(default=0, description="prefill forwards of the target model")
    captured_forwards: int = Field(default=0, description="forwards that ran with a capture hook")

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in type(self).model_fields})


class SpoolStatus(BaseModel):
    """The content of ``status.json``: what the plugin of one rank is, and what it has done."""

    model_config = ConfigDict(extra="ignore")

    state: Literal["capturing", "refused"] = Field(
        description="refused: the server runs, but cannot capture; see problem"
    )
    problem: str = Field(default="", description="why nothing is captured, where state is refused")
    server_id: str = Field(default="", description="one per server start")
    pid: int
    rank: str = Field(description="like dp0-pp0-tp0")
    writer: bool = Field(description="whether this rank writes dumps (one rank of a group does)")
    mode: str = Field(description="SGLANG_CAPTURE_MODE")
    url: str = Field(default="", description="where the server listens, as its own arguments say")
    model_path: str = ""
    tokenizer_path: str = ""
    spec: dict[str, Any] = Field(default_factory=dict, description="the default CaptureSpec of this server")
    quota_bytes: int = Field(description="most bytes this server may hold in the spool")
    used_bytes: int = Field(description="bytes it holds")
    free_bytes: int = Field(description="what the quota and the file system still allow, whichever is less")
    on_full: str = Field(description="SGLANG_CAPTURE_ON_FULL")
    token_required: bool = Field(default=False, description="whether marks need a capture_token")
    in_flight: int = Field(default=0, description="captures begun and not ended")
    counts: Counts = Field(default_factory=Counts)
    last_error: str = ""
    hooks: dict[str, str] = Field(default_factory=dict, description="what is hooked, and how it stands")
    sglang_version: str = ""
    plugin_version: str = ""
    started: float = Field(description="seconds since the epoch")
    time: float = Field(description="when this status was written, seconds since the epoch")

    @property
    def alive(self) -> bool:
        """Whether the process that wrote this still writes: its status is fresh."""
        return time.time() - self.time < STATUS_STALE_SECONDS


def open_directory(directory: Path, *, create: bool = True) -> Path:
    """Check that ``directory`` is a spool we may trust, making it with mode 0700 if it is not there.

    Raises:
        SpoolError: it is a link, somebody else's, writable by others, no directory, or cannot be made.
    """
    if create:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            pass  # what is there instead is told below
        except OSError as error:
            raise SpoolError(f"the spool {directory} cannot be made: {error}; set SGLANG_CAPTURE_DIR") from error
    try:
        found = directory.lstat()
    except OSError as error:
        raise SpoolError(f"there is no spool at {directory}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise SpoolError(
            f"the spool {directory} must be a directory of its own; found a link or a file. "
            "Remove it, or set SGLANG_CAPTURE_DIR to another place"
        )
    if found.st_uid != os.geteuid():
        raise SpoolError(
            f"the spool {directory} belongs to user {found.st_uid}, and this is user {os.geteuid()}: "
            "set SGLANG_CAPTURE_DIR to a directory of your own"
        )
    if found.st_mode & 0o022:
        raise SpoolError(
            f"the spool {directory} is writable by others (mode {found.st_mode & 0o777:o}): set SGLANG_CAPTURE_DIR to "
            "a directory of its own, or chmod 700 this one if nobody else uses it"
        )
    return directory


def dump_path(directory: Path, capture_id: str) -> Path:
    """Where the dump of a capture stands.

    Raises:
        ValueError: ``capture_id`` is none; no path is ever built from an unchecked id.
    """
    return directory / f"{_checked(capture_id)}{DUMP_SUFFIX}"


def failure_path(directory: Path, capture_id: str) -> Path:
    """Where the failure of a capture stands. Raises ValueError as :func:`dump_path`."""
    return directory / f"{_checked(capture_id)}{FAILED_SUFFIX}"


def id_of(path: Path) -> str | None:
    """The capture id of a dump's or a failure's file name, ``None`` for any other file."""
    found = _told_by(path.name)
    return found[0] if found else None


def ids(directory: Path) -> tuple[set[str], set[str]]:
    """The captures that have a complete dump, and those that have a failure; without probes.

    One look at the directory, and no more than its names: the service takes it every few seconds, whatever is there.
    """
    dumped: set[str] = set()
    failed: set[str] = set()
    for found in map(_told_by, _names(directory)):
        if found and not is_probe(found[0]):
            (dumped if found[1] == DUMP_SUFFIX else failed).add(found[0])
    return dumped, failed


def is_probe(capture_id: str) -> bool:
    """Whether a capture was made for a look at the server (:mod:`sglang_capture.probe`)."""
    return capture_id.startswith(PROBE_PREFIX)


def dumps(directory: Path) -> Iterator[Path]:
    """The complete dumps, in no order; without probes."""
    return (dump_path(directory, name) for name in ids(directory)[0])


def failures(directory: Path) -> Iterator[Path]:
    """The ``.failed.json`` files, in no order; without probes."""
    return (failure_path(directory, name) for name in ids(directory)[1])


def read_failure(path: Path) -> Failure | None:
    """The failure in ``path``, ``None`` if it is gone or unreadable."""
    try:
        return Failure.model_validate_json(read_small(path))
    except (OSError, ValidationError):
        return None


def write_failure(directory: Path, failure: Failure) -> None:
    """Record why a capture has no dump; a failure never hides a dump of the same id that is there.

    Raises:
        OSError: the directory cannot be written.
    """
    write_atomically(failure_path(directory, failure.capture_id), failure.model_dump_json().encode())


def read_status(directory: Path) -> SpoolStatus | None:
    """``status.json``, ``None`` if there is none (no server with the plugin has run on this spool)."""
    return _read_status_file(directory / STATUS_NAME)


def read_rank_statuses(directory: Path) -> list[SpoolStatus]:
    """The status of every rank of the newest server on this spool."""
    head = read_status(directory)
    found = (_read_status_file(path) for path in sorted(directory.glob("status-*.json")))
    return [status for status in found if status and head and status.server_id == head.server_id]


def remove(directory: Path, capture_id: str) -> bool:
    """Remove the dump and the failure of a capture, freeing its pages; whether there was one."""
    there = False
    for path in (dump_path(directory, capture_id), failure_path(directory, capture_id)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            there = True
    return there


def clear_probes(directory: Path) -> None:
    """Remove the probes of whoever was killed while he looked, and what the server wrote of them afterwards."""
    for path in [directory / name for name in _all_names(directory) if name.startswith(PROBE_PREFIX)]:
        with contextlib.suppress(OSError):  # somebody else did, or somebody made a directory
            if time.time() - path.lstat().st_mtime > PROBE_SECONDS:
                path.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees all of it or none, mode 0600; of two writers at once the last wins."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_status(path: Path, status: SpoolStatus) -> None:
    """Write a status file. On a full file system it is written over in place: it must not look like a hung server's.

    Raises:
        OSError: it cannot be written at all.
    """
    data = status.model_dump_json().encode()
    try:
        write_atomically(path, data)
    except OSError as error:
        if error.errno not in NO_ROOM or not path.exists():
            raise
        _write_over(path, data)


def _write_over(path: Path, data: bytes) -> None:
    """Into the pages that the file has. A reader in that very moment may see a mixture, which is no JSON to it."""
    with path.open("r+b") as file:
        before = os.fstat(file.fileno()).st_size
        file.write(data.ljust(before))


def _checked(capture_id: str) -> str:
    if not is_capture_id(capture_id):
        raise ValueError(f"not a capture id: {capture_id!r:.80}")
    return capture_id


def _told_by(name: str) -> tuple[str, str] | None:
    """The capture id and the suffix of a dump's or a failure's file name."""
    for suffix in (FAILED_SUFFIX, DUMP_SUFFIX):
        if name.endswith(suffix):
            capture_id = name[: -len(suffix)]
            return (capture_id, suffix) if is_capture_id(capture_id) else None
    return None


def _all_names(directory: Path) -> list[str]:
    """The names of whatever is there; none where there is no directory."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []


def _names(directory: Path) -> list[str]:
    """The names of regular files: to open a pipe or a device may take for ever."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def _read_status_file(path: Path) -> SpoolStatus | None:
    try:
        return SpoolStatus.model_validate_json(read_small(path))
    except (OSError, ValidationError):
        return None
