"""One rule: what a target's method makes of a draft's layer ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sglang_capture.drafts.releases import OLDEST

Algorithm = Literal["eagle3", "dflash", "dspark"]

SETTERS: Final[dict[str, str]] = {
    "eagle3": "set_eagle3_layers_to_capture",
    "dflash": "set_dflash_layers_to_capture",
    "dspark": "set_dspark_layers_to_capture",
}
"""The method of a target's class, by algorithm. DSPARK takes the one for DFlash where a class has no other."""

Meaning = Literal["outputs", "outputs if the first is 1", "outputs unless the greatest is n", "indices"]
"""What a list of ids means: outputs of layers (index ``id + 1``) or hidden-state indices, always or on a condition."""

_ADDED: Final[dict[str, Callable[[Sequence[int], int], int]]] = {
    "outputs": lambda ids, layers: 1,
    "outputs if the first is 1": lambda ids, layers: int(ids[0] == 1),
    "outputs unless the greatest is n": lambda ids, layers: int(max(ids) != layers),
    "indices": lambda ids, layers: 0,
}


@dataclass(frozen=True)
class Setter:
    """One row of the table.

    Attributes:
        algorithm: for drafts of which kind.
        architectures: as a model's ``config.json`` has them.
        ids: what the ids mean.
        source: module and class below ``sglang.srt.models`` that define the method.
        since: the first release for which the row holds.
        until: the first for which it does not any more; empty if it still does.
        default_added: what is added to ``[2, n//2, n - 3]``, the indices taken where an EAGLE-3 draft names no ids.
        strict: the method refuses ids that are not ascending and different.
        none: why there is no telling, or no hidden state of a layer: the ids then lead to no index.
    """

    algorithm: Algorithm
    architectures: tuple[str, ...]
    ids: Meaning
    source: str
    since: str = OLDEST
    until: str = ""
    default_added: int = 0
    strict: bool = False
    none: str = ""

    def indices(self, ids: Sequence[int] | None, layers: int) -> tuple[int, ...]:
        """The hidden-state indices that a target of ``layers`` layers hands over, ascending whatever order ids have.

        Index ``layers`` is the output of the last layer before the final norm; not every model can hand it over.
        ``None`` is for a config without ids, which only EAGLE-3 takes.
        """
        if ids is None:
            return tuple(index + self.default_added for index in (2, layers // 2, layers - 3))
        return tuple(sorted({number + _ADDED[self.ids](ids, layers) for number in ids}))

    def ids_for(self, indices: Sequence[int], layers: int) -> tuple[int, ...] | None:
        """The ids with which the target hands over ``indices``; ``None`` if there are none."""
        wanted = tuple(sorted(indices))
        for added in (1, 0):
            ids = tuple(index - added for index in wanted)
            if not self.none and ids[0] >= 0 and self.indices(ids, layers) == wanted:
                return ids
        return None
