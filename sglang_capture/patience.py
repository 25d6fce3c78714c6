"""How long the engine's thread may be kept waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Patience:
    """The time that one forward may wait, for all of its requests together.

    SGLang's watchdog ends a server whose forward takes too long. Where each request of a batch may wait, the batch may
    wait as often as it has requests; so what one has waited is taken from what is left to the others.

    Args:
        seconds: for each forward.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._left = seconds

    def renew(self) -> None:
        """A new forward begins."""
        self._left = self._seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[float]:
        """The seconds that are left; what the block takes is gone."""
        started = time.monotonic()
        try:
            yield self._left
        finally:
            self._left = max(0.0, self._left - (time.monotonic() - started))
