"""`specforge train …` on a machine without a GPU, faster than by settings alone. Runs in SpecForge's environment.

SpecForge's loss is a Triton kernel. Triton's interpreter can run it on a CPU, row by row in Python: minutes for what
takes torch a second. So the same loss is put in its place, written in torch. Everything else is SpecForge as it is.
"""

from __future__ import annotations

import os

os.environ.setdefault("SPECFORGE_DEVICE", "cpu")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import sys

import specforge.core.loss
from torch import Tensor


class TorchLoss:
    """``specforge.core.loss.LogSoftmaxLoss``: the cross entropy with the target's distribution, mean over all rows."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        """``logits`` and ``target`` ``[B, T, V]``, ``position_mask`` ``[B, T, 1]``; masked rows count 0."""
        rows = (target * logits.float().log_softmax(dim=-1)).sum(dim=-1, keepdim=True)
        return -(rows * position_mask.bool()).mean()


specforge.core.loss.LogSoftmaxLoss = TorchLoss  # before anything else takes it from there

from specforge.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
