"""A file in shared memory that is written through its mapping: every page is reserved before anybody touches it.

Writing through a mapping to a page that a full tmpfs cannot give is SIGBUS, the end of the process; ``posix_fallocate``
says ENOSPC instead. Nobody may truncate such a file while somebody else has it mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import sys
import weakref
from pathlib import Path

import torch

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python's ``mmap`` has no name for."""

_libc = ctypes.CDLL(None, use_errno=True)


class MappedFile:
    """An open file and its mapping.

    Attributes:
        path: its name at present.
        bytes: its length; its first ``bytes`` have pages.
        descriptor: open for reading and writing as long as this object lives.
    """

    def __init__(self, path: Path, flags: int):
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        weakref.finalize(self, os.close, self.descriptor)
        self.bytes = os.fstat(self.descriptor).st_size
        self._mapping: mmap.mmap | None = None
        self._entered = 0

    @classmethod
    def create(cls, path: Path) -> MappedFile:
        """An empty file with mode 0600. Raises OSError: it is there, or cannot be made."""
        return cls(path, os.O_CREAT | os.O_EXCL)

    @classmethod
    def attach(cls, path: Path) -> MappedFile:
        """One that another process made, mapped as it is. Raises OSError: it is gone."""
        file = cls(path, 0)
        file._mapping = mmap.mmap(file.descriptor, file.bytes)
        return file

    def reserve(self, size: int) -> None:
        """Have pages for ``size`` bytes at least. Raises OSError (``ENOSPC``) if they cannot be had."""
        if size > self.bytes:
            os.posix_fallocate(self.descriptor, self.bytes, size - self.bytes)
            self.bytes = size

    def end_at(self, size: int) -> None:
        """Make it ``size`` bytes long, and map it. No view of it may live: the mapping may move."""
        self.reserve(size)
        os.ftruncate(self.descriptor, size)
        self.bytes = size
        if self._mapping is None:
            self._mapping = mmap.mmap(self.descriptor, size)
        else:
            self._mapping.resize(size)
        self._enter()

    def view(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """``count`` elements at a byte offset, as a tensor that *is* these pages, and keeps them mapped."""
        assert self._mapping is not None
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)

    def mine_alone(self) -> bool:
        """Whether nobody, in this process or another, reads, maps or keeps it: only then may its content change.

        A second name is somebody's way of keeping it. The kernel grants a lease for writing only to who has a file open
        alone, mappings included (``fcntl(2)``). No view of ours may live either; each holds the mapping.
        """
        mapping_and_argument = 2
        if sys.getrefcount(self._mapping) > mapping_and_argument or os.fstat(self.descriptor).st_nlink != 1:
            return False
        try:
            # Who opens the file in this very moment would have the kernel send us SIGIO, which ends a process.
            fcntl.fcntl(self.descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def move(self, path: Path) -> None:
        """Give it another name."""
        self.path.rename(path)
        self.path = path

    def remove(self) -> None:
        """Take away its name; its pages go when nobody has it open or mapped any more."""
        self.path.unlink(missing_ok=True)

    def _enter(self) -> None:
        """Enter the new pages into the page table here, so that whoever copies rows meets no faults: an advice."""
        begin = min(self._entered, self.bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self._entered = self.bytes
        if begin < self.bytes:
            start = self.view(torch.uint8, self.bytes - begin, begin).data_ptr()
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(self.bytes - begin), _POPULATE_WRITE)
