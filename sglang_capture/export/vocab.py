"""Vocabulary maps: which target tokens a draft with a smaller vocabulary can say.

A draft of ``D`` tokens predicts the ``D`` tokens that the training data has most often. What counts is a *supervised*
token: one whose own entry of the loss mask is 1. The mask is taken where it stands, not moved by one, for so do the
counters of SpecForge 0.2 (``count_effective_feature_tokens``), speculators 0.9 (``save_token_frequency_distribution``)
and Automodel 0.7 (``build_eagle3_token_mapping``); that trainers later shift ids and masks, and clear the last entry,
changes no count but that of the first or last token of a sample. A mask of all ones is counted wholly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sglang_capture.export.base import ExportError, ExportUsageError
from sglang_capture.shards import CaptureDataset


@dataclass(frozen=True)
class VocabMap:
    """The draft's tokens in ascending order of their target ids.

    Attributes:
        d2t: int64 ``[D]``, offsets: draft token ``i`` is target token ``i + d2t[i]``.
        t2d: bool ``[V]``: whether the draft has target token ``j``.
        coverage: the share of the counted tokens that the draft can say, 0 to 1; 1 if none was counted.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float

    @property
    def size(self) -> int:
        """D, the draft's vocabulary."""
        return int(self.d2t.shape[0])

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 ``[D]``: the target's id of each draft token, ascending."""
        return self.d2t + torch.arange(self.size)

    @property
    def pair(self) -> dict[str, torch.Tensor]:
        """As SpecForge and AngelSlim keep it, in ``vocab_mapping.pt``."""
        return {"d2t": self.d2t, "t2d": self.t2d}

    @property
    def note(self) -> str:
        """What to tell the user about it."""
        return (
            f"the draft vocabulary of {self.size:,} tokens (of {len(self.t2d):,}) holds {self.coverage:.2%} of the "
            "supervised tokens; the others it can never predict"
        )


def token_counts(
    dataset: CaptureDataset, rows: Iterable[int], *, vocab_size: int | None = None, seq_length: int | None = None
) -> torch.Tensor:
    """How often each token is supervised in samples ``rows``: int64 ``[V]``. One sample is in memory at a time.

    Args:
        vocab_size: V; the spec's if not given.
        seq_length: count the first so many tokens of a sample only, for a format that truncates.

    Raises:
        ExportError: a token id is outside the vocabulary.
    """
    size = vocab_size or dataset.spec.vocab_size
    counts = torch.zeros(size, dtype=torch.int64)
    for row in rows:
        sample = dataset[row]
        tokens = sample["input_ids"][:seq_length][sample["loss_mask"][:seq_length].bool()]
        if tokens.numel() and int(tokens.max()) >= size:
            raise ExportError(
                f"sample {sample['sample_id']} holds token id {int(tokens.max())}, and the vocabulary has {size}: "
                "it was captured from another model than its spec says"
            )
        counts.scatter_add_(0, tokens, torch.ones_like(tokens))
    return counts


def map_from_counts(counts: torch.Tensor, draft_vocab_size: int) -> VocabMap:
    """The map onto the ``draft_vocab_size`` tokens of highest count; of equal counts the lower id is taken.

    Where fewer different tokens were counted, the lowest ids that were not fill it up. The whole vocabulary gives the
    identity: all offsets 0.

    Raises:
        ExportUsageError: the size is below 1 or above the target's vocabulary.
    """
    target_size = len(counts)
    if not 1 <= draft_vocab_size <= target_size:
        raise ExportUsageError(
            f"a draft vocabulary has 1 to {target_size} tokens (the target's); found {draft_vocab_size}: "
            "give another --draft-vocab-size"
        )
    chosen = torch.argsort(counts, descending=True, stable=True)[:draft_vocab_size].sort().values
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[chosen] = True
    total = int(counts.sum())
    coverage = int(counts[chosen].sum()) / total if total else 1.0
    return VocabMap(d2t=chosen - torch.arange(draft_vocab_size), t2d=t2d, coverage=coverage)


def vocab_map(
    dataset: CaptureDataset, rows: Iterable[int], draft_vocab_size: int, *, seq_length: int | None = None
) -> VocabMap:
    """:func:`map_from_counts` of :func:`token_counts`, for samples ``rows`` of ``dataset``."""
    return map_from_counts(token_counts(dataset, rows, seq_length=seq_length), draft_vocab_size)
