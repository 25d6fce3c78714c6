"""Pages that are used again: a dump that was packed becomes the next one.

Fresh pages of shared memory cost several times what copying into them does: the kernel clears each, and enters it into
a page table. So the plugin keeps the mappings of the dumps it has published, and who has packed a dump hands it back
(:func:`hand_back`): it moves the file to ``<spool>/.free/`` instead of removing it. The next capture of about that size
is laid out in the same file. Before that the kernel is asked whether anybody still reads it
(:meth:`~sglang_capture.mapped_file.MappedFile.mine_alone`), so nobody who opened or mapped a dump sees rows change.
What no check can see is pages on their way: who sends a dump by ``sendfile`` or ``splice`` must have it arrive before
the dump is packed, or read it.

Who just removes a dump frees its memory, as ever. Files that wait here are given up when room is short, and after a
minute without use: memory that nobody needs is not ours.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sglang_capture import spool
from sglang_capture.claim import server_on
from sglang_capture.mapped_file import MappedFile
from sglang_capture.quota import Account, in_pages

SMALLEST = 256 << 10
"""Bytes of a dump that is worth it."""
MOST_KEPT = 512
"""Published dumps whose mappings are kept: each takes two file descriptors and a mapping, and a process has few."""
MOST_IDLE = 0.5
"""The part of the quota that may wait for use."""
IDLE_SECONDS = 60.0
STRAY_SECONDS = 5.0
"""A file that was handed back, and whose mapping no rank has kept, is removed after this time."""
_NEAR = 2
"""A file serves captures from half its size to twice its size; the rest of it is given back, or reserved anew."""


def hand_back(directory: Path, capture_id: str, inode: int) -> None:
    """Remove the dump (and the failure) of a capture, leaving its pages to the server that writes there, if one does.

    Whoever calls it has copied what it wants: the file may be another capture's at once.

    Args:
        inode: of the dump that was copied; another one that has its name by now stays.
    """
    dump = spool.dump_path(directory, capture_id)
    with contextlib.suppress(FileNotFoundError):
        if dump.lstat().st_ino != inode:
            return
    if server_on(directory):
        with contextlib.suppress(OSError):  # no such directory: the server takes nothing back
            dump.rename(directory / spool.FREE_DIRECTORY / dump.name)
    spool.remove(directory, capture_id)


@dataclass
class _Idle:
    file: MappedFile
    since: float


class SlabPool:
    """The published dumps of one writer whose pages it may have back, and those it has back already.

    Args:
        directory: the spool.
        account: where the pages count, also while they are idle.
        rank: the writer's name, unique on the spool.
    """

    def __init__(self, directory: Path, account: Account, rank: str):
        self._directory = directory
        self._free = directory / spool.FREE_DIRECTORY
        self._account = account
        self._rank = rank
        self._number = 0
        self._kept: dict[str, MappedFile] = {}
        self._idle: list[_Idle] = []
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """What the account counts, and a capture can have at once."""
        with self._lock:
            return sum(in_pages(idle.file.bytes) for idle in self._idle)

    def keep(self, file: MappedFile, final: Path) -> None:
        """A dump was published as ``final``: its pages may come back."""
        with self._lock:
            if file.bytes >= SMALLEST and len(self._kept) < MOST_KEPT:
                file.path = final
                self._kept[final.name] = file
                with contextlib.suppress(OSError):  # then nothing comes back
                    self._free.mkdir(mode=0o700, exist_ok=True)

    def take(self, part: Path, size: int) -> MappedFile | None:
        """A file of about ``size`` bytes, now called ``part``, also in the account; ``None`` if there is none.

        Its length may be another than ``size``: :meth:`MappedFile.end_at` mends that.
        """
        with self._lock:
            self._collect()
            near = [idle for idle in self._idle if idle.file.bytes / _NEAR <= size <= idle.file.bytes * _NEAR]
            # Rather one that need not grow; of those, and of the others, the one that is nearest.
            for idle in sorted(near, key=lambda idle: (idle.file.bytes < size, abs(idle.file.bytes - size))):
                file = idle.file
                if file.mine_alone() and self._account.exchange(file.path, part, max(size, file.bytes)):
                    self._idle.remove(idle)
                    with contextlib.suppress(OSError):  # somebody has just removed it
                        file.move(part)
                        return file
        return None

    def give_up(self, size: int) -> None:
        """Remove idle files until the account has room for ``size`` bytes, or none is left."""
        with self._lock:
            self._collect()
            while self._idle and self._account.free < size:
                self._remove(self._idle[0])

    def tidy(self) -> None:
        """About once a second: see what came back, and let go of what nobody needs."""
        with self._lock:
            self._collect()
            now = time.monotonic()
            while self._idle and (now - self._idle[0].since > IDLE_SECONDS or self._too_many()):
                self._remove(self._idle[0])
            self._forget_removed()
            self._remove_strays()

    def close(self) -> None:
        """Remove all that is idle."""
        with self._lock:
            self._collect()
            while self._idle:
                self._remove(self._idle[0])
            with contextlib.suppress(OSError):  # there is none, or something in it
                self._free.rmdir()

    # -- with the lock held -----------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take what was handed back; the oldest is the first in the list."""
        for path in self._handed_back():
            file = self._kept.get(path.name)
            with contextlib.suppress(OSError):  # another rank took it for a stray
                if file is not None and os.path.samestat(path.lstat(), os.fstat(file.descriptor)):
                    del self._kept[path.name]
                    self._number += 1
                    final, file.path = file.path, path
                    file.move(self._directory / f"{spool.PART_PREFIX}{self._rank}-idle-{self._number}")
                    self._account.rename(final, file.path, file.bytes)
                    self._idle.append(_Idle(file, time.monotonic()))

    def _handed_back(self) -> list[Path]:
        try:
            return list(self._free.iterdir())
        except OSError:  # none was kept yet, the spool was moved away, or there is something else
            return []

    def _too_many(self) -> bool:
        return sum(idle.file.bytes for idle in self._idle) > MOST_IDLE * self._account.limit

    def _remove(self, idle: _Idle) -> None:
        self._idle.remove(idle)
        idle.file.remove()
        self._account.release(idle.file.path)

    def _forget_removed(self) -> None:
        """A mapping holds the pages of a file that somebody removed."""
        for name, file in list(self._kept.items()):
            if os.fstat(file.descriptor).st_nlink == 0:
                del self._kept[name]
        for idle in list(self._idle):
            if os.fstat(idle.file.descriptor).st_nlink == 0:
                self._remove(idle)

    def _remove_strays(self) -> None:
        for path in self._handed_back():
            with contextlib.suppress(OSError):
                if not 0 <= time.time() - path.lstat().st_ctime < STRAY_SECONDS:
                    path.unlink()
