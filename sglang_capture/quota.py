"""How many bytes a spool may hold: parsing, the default, and the account of one writer.

A page of ``/dev/shm`` is memory: it counts against the file system's size *and* against the memory limit of the
process's control group. A quota that ignores the second ends in the out-of-memory killer.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

DEFAULT_SHARE = 0.5
"""The part of what is free at start that the spool may take, where no quota is set."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power

_QUOTA = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|[A-Za-z]*)\s*")

_CGROUP = Path("/sys/fs/cgroup")

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class QuotaError(ValueError):
    """A quota that cannot be read."""


def parse_quota(text: str, free: int) -> int:
    """Bytes of ``64GiB``, ``500MB``, plain bytes, or a percentage of ``free`` like ``50%``.

    Raises:
        QuotaError: it is none of these, or it is zero.
    """
    found = _QUOTA.fullmatch(text)
    unit = found["unit"].upper() if found else ""
    if found is None or (unit != "%" and unit not in _UNITS):
        raise QuotaError(f"a quota is a size like 64GiB, 500MB or 1073741824, or a share like 50%; found {text!r}")
    number = float(found["number"])
    if unit == "%":
        if number > 100:
            raise QuotaError(f"a quota of more than 100% cannot be; found {text!r}")
        result = int(free * number / 100)
    else:
        result = int(number * _UNITS[unit])
    if result <= 0:
        raise QuotaError(f"the quota {text!r} comes to 0 bytes ({free} are free); use SGLANG_CAPTURE_MODE=off to stop")
    return result


def in_pages(size: int) -> int:
    """The memory that a file of ``size`` bytes takes on a tmpfs: whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def free_bytes(directory: Path) -> int:
    """What the file system of ``directory`` and the control group's memory limit leave free, whichever is less."""
    file_system = os.statvfs(directory)
    free = file_system.f_bavail * file_system.f_frsize
    headroom = cgroup_headroom()
    return free if headroom is None else min(free, headroom)


def cgroup_headroom(root: Path = _CGROUP, own: str | None = None) -> int | None:
    """Bytes until the nearest memory limit of the process's control group or one above it, ``None`` without one.

    Reads version 2, then version 1. Page cache that the kernel can drop counts as used there; it is given back here.

    Args:
        root: where the control groups are mounted.
        own: this process's group below it, like ``system.slice/sglang.service``; found by default.
    """
    path = root / (_own_group() if own is None else own).strip("/")
    groups = [group for group in (path, *path.parents) if group == root or root in group.parents]
    rooms = [room for group in (*groups, root / "memory") if (room := _headroom(group)) is not None]
    return min(rooms, default=None)


def _own_group() -> str:
    """The path in the line ``0::/path``: version 2's only group; in a container mostly ``/``."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _headroom(group: Path) -> int | None:
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None and limit < 1 << 60:  # version 1 says "none" with a huge number
            return max(0, limit - used + _stat_value(group / "memory.stat", cache_key))
    return None


class Account:
    """The memory that one writer's files hold, against its part of the quota. Safe to use from several threads.

    Sizes are given in bytes and counted in whole pages, as the memory is: many small captures stay below the quota too.

    What others remove (the side service, after packing) is noticed when room is short or the status is written, by
    looking whether the files are still there; nothing has to be told.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)

    def reserve(self, path: Path, size: int) -> bool:
        """Enter a file to be; False if it does not fit, even after looking what is gone."""
        if in_pages(size) > self.free:
            self.look()
        with self._lock:
            if in_pages(size) > self.free:
                return False
            self._enter(path, size)
        return True

    def release(self, path: Path) -> None:
        with self._lock:
            self._enter(path, 0)

    def exchange(self, old: Path, new: Path, size: int) -> bool:
        """A file gets another name and size; False, and nothing changed, if it would not fit so."""
        with self._lock:
            if in_pages(size) - self._files.get(old, 0) > self.free:
                return False
            self._enter(old, 0)
            self._enter(new, size)
        return True

    def rename(self, old: Path, new: Path, size: int) -> None:
        """A part became a dump of ``size`` bytes."""
        with self._lock:
            self._enter(old, 0)
            self._enter(new, size)

    def adopt(self, path: Path) -> None:
        """Enter a file that an earlier server left."""
        with contextlib.suppress(OSError), self._lock:
            self._enter(path, path.stat().st_size)

    def look(self) -> None:
        """Forget the published files that are gone; parts being filled are the writer's own and stay."""
        for path in list(self._files):
            if not path.name.startswith(".") and not path.exists():
                self.release(path)

    def _enter(self, path: Path, size: int) -> None:
        held = in_pages(size)
        self.used += held - self._files.pop(path, 0)
        if held:
            self._files[path] = held


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat_value(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
