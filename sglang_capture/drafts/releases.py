"""The releases of SGLang whose source the tables of this package were read from and are tested against."""

from __future__ import annotations

from typing import Final

OLDEST: Final = "0.5.15"
NEWEST: Final = "0.5.23"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.5.22.post1`` gives ``(0, 5, 22)``."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def holds(version: str, since: str, until: str = "") -> bool:
    """Whether ``version`` is one of the releases from ``since`` on, before ``until``."""
    return release(since) <= release(version) and (not until or release(version) < release(until))


def is_known(version: str) -> bool:
    """Whether the tables speak of this release."""
    return release(OLDEST) <= release(version) <= release(NEWEST)
