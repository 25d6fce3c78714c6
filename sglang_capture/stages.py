"""How the pipeline stages of a server fill one dump together.

Each stage has its own layers, in a process of its own on the same machine. The first stage answers for the dump: it
reserves the bytes, lays the file out, publishes it, and records a failure. The later ones map the same file and fill
their layers' rows. Beside the dump lies its *board*, with a slot for each stage: the first says there that the file is
laid out, and which it is, or that it gave the capture up; each later one that its rows are complete, or why they will
not be.

A stage cannot compute before the one in front of it has, and the first makes the board before it computes. So a later
stage that finds no board knows that the capture was refused, or is over. Only the first makes and removes files; the
others open what is there, and nothing stays behind in whatever order things happen.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

from sglang_capture.capture import CaptureRequest
from sglang_capture.spool import PART_PREFIX

_SLOT = 256
_LAID_OUT, _DONE, _FAILED = b"L", b"D", b"F"

HANDOVER_SECONDS = 60.0
"""How long the first stage, its own rows complete, waits for the later ones."""


def board_path(directory: Path, group: str, request: CaptureRequest) -> Path:
    """The board of a request, as all stages of the group call it.

    The name holds all that the rows depend on, so a stage that is late with an earlier request of the same id can only
    ever write the same rows again. The dumps of two such requests are two files.
    """
    digest = xxhash.xxh3_128(request.input_ids.numpy().tobytes())
    names = (request.capture_id, request.request_id, request.spec.layers, request.spec.last_hidden)
    digest.update(repr(names).encode())
    return directory / f"{PART_PREFIX}{group}-{digest.hexdigest()}.board"


class Board:
    """The board beside an unfinished dump: a file with a slot of 256 bytes for each stage."""

    def __init__(self, path: Path, descriptor: int):
        self._path = path
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    @classmethod
    def create(cls, path: Path, stages: int) -> Board:
        """The board of a capture that the first stage begins; one that an earlier attempt left is replaced.

        Raises:
            OSError: the file system has no room for it.
        """
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        board = cls(path, os.open(path, flags, 0o600))
        try:
            os.posix_fallocate(board._descriptor, 0, stages * _SLOT)
        except OSError:
            board.remove()  # a later stage that found it would wait for a layout that never comes
            raise
        return board

    @classmethod
    def open(cls, path: Path) -> Board | None:
        """The board that the first stage made, ``None`` if there is none (any more)."""
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Unless a later attempt's board has taken its place."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), os.fstat(self._descriptor)):
                self._path.unlink()

    def say_laid_out(self, part: Path) -> None:
        self._say(0, _LAID_OUT, part.name)

    def say_done(self, stage: int) -> None:
        self._say(stage, _DONE)

    def say_failed(self, stage: int, reason: str) -> None:
        self._say(stage, _FAILED, reason)

    @property
    def laid_out(self) -> bool:
        return os.pread(self._descriptor, 1, 0) == _LAID_OUT

    @property
    def part(self) -> Path:
        """The unfinished dump, once it is laid out."""
        return self._path.with_name(os.pread(self._descriptor, _SLOT, 0)[1:].rstrip(b"\0").decode())

    @property
    def given_up(self) -> bool:
        """Whether the first stage ended the capture: nobody wants its rows any more."""
        return os.pread(self._descriptor, 1, 0) == _FAILED

    def failure(self, stages: int) -> str | None:
        """Why a later stage will not complete, ``None`` if none has said so."""
        for stage in range(1, stages):
            slot = os.pread(self._descriptor, _SLOT, stage * _SLOT)
            if slot[:1] == _FAILED:
                return slot[1:].rstrip(b"\0").decode(errors="replace")
        return None

    def complete(self, stages: int) -> bool:
        """Whether all later stages are done."""
        return all(os.pread(self._descriptor, 1, stage * _SLOT) == _DONE for stage in range(1, stages))

    def _say(self, stage: int, state: bytes, reason: str = "") -> None:
        # The state is written last: who sees it sees the whole reason.
        os.pwrite(self._descriptor, reason.encode()[: _SLOT - 1], stage * _SLOT + 1)
        os.pwrite(self._descriptor, state, stage * _SLOT)
