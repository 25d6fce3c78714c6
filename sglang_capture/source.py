"""Captures by id, wherever they lie: what a comparison takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_capture.dump import Dump
from sglang_capture.errors import CaptureError, UsageError


class SourceError(CaptureError):
    """A place with captures that cannot be read."""


class NoSourceError(SourceError, UsageError):
    """A place that was named for its captures and holds none."""


@dataclass(frozen=True)
class Source:
    """Captures by id; ``load`` maps one, and raises :class:`CaptureError` if it is damaged."""

    ids: Sequence[str]
    load: Callable[[str], Dump]

    def choose(self, count: int, seed: int) -> list[str]:
        """``count`` ids, or all if there are fewer; the same ones for the same seed."""
        return random.Random(seed).sample(sorted(self.ids), min(count, len(self.ids)))
