"""What each trainer needs of a capture beside the layers, and the export that it reads.

Sources: the loaders of the trainers, and what they do with the last hidden state: they multiply it with the output head
(``post``), or norm it themselves first (``pre``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from sglang_capture.drafts.configs import DraftConfig, Kind

Needed = Literal["none", "post", "pre", "either"]
"""A last hidden state: not at all, after the final norm, before it, or one of them as the data says."""


@dataclass(frozen=True)
class Trainer:
    """One way to train drafts of one kind.

    Attributes:
        name: of the trainer.
        kind: of the drafts.
        needs: the last hidden state that its files must hold.
        export: the name of the export (``--to``).
        count: the layers that it takes, if only so many.
    """

    name: str
    kind: Kind
    needs: Needed
    export: str
    count: int | None = None


TRAINERS: Final[tuple[Trainer, ...]] = (
    Trainer("SpecForge", "eagle3", "post", "specforge", count=3),
    Trainer("SpecForge", "dflash", "none", "specforge-dflash"),
    Trainer("SpecForge", "dspark", "post", "specforge-dspark"),
    Trainer("speculators", "eagle3", "pre", "speculators"),
    Trainer("speculators", "dflash", "pre", "speculators"),
    Trainer("ModelOpt", "eagle3", "either", "modelopt"),
    Trainer("ModelOpt", "dflash", "either", "modelopt"),
    Trainer("AngelSlim", "eagle3", "post", "angelslim", count=3),
    Trainer("AngelSlim", "dflash", "none", "angelslim-dflash"),
    Trainer("TorchSpec", "eagle3", "post", "torchspec", count=3),
    Trainer("NeMo Automodel", "eagle3", "post", "automodel-eagle3", count=3),
    Trainer("NeMo Automodel", "dspark", "post", "automodel-dspark"),
    Trainer("EAGLE", "eagle", "post", "eagle"),
)


def trainer_of(draft: DraftConfig, name: str | None = None) -> Trainer | None:
    """The trainer or export called ``name``, else the one the config tells, else the first that makes such drafts.

    ``None`` if that one makes no such drafts from captures.
    """
    rows = [row for row in TRAINERS if row.kind == draft.kind]
    if wanted := name or draft.trainer:
        rows = [row for row in rows if plain(wanted) in (plain(row.name), row.export)]
    return next(iter(rows), None)


def is_export(name: str) -> bool:
    """Whether ``name`` is an export for one of these trainers, and not a neutral format."""
    return any(row.export == name for row in TRAINERS)


def plain(name: str) -> str:
    """A trainer's name as it may be typed: ``NeMo Automodel`` is ``nemo-automodel``."""
    return name.lower().replace(" ", "-")
