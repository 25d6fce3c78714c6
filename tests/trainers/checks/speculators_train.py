"""OUT KIND DATA MODEL STEPS: ``speculators train`` itself on the CPU, with checkpoint and validation.

It takes a GPU for granted in three places, and these are replaced; all else is as its own flags say (sdpa, since flex
attention has no backward on a CPU; eager, since its fused loss is a Triton kernel).
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import speculators.train.trainer as training
import torch
from record import save_losses
from speculators.cli import app

HIDDEN, VOCABULARY = 128, 512


def train_on_the_cpu() -> None:
    training.get_local_rank = lambda: torch.device("cpu")  # else device 0, a GPU
    torch.accelerator.synchronize = lambda *_: None  # else an error where there is no accelerator
    prepare = training.Trainer.__init__

    def prepare_for_the_cpu(self: Any, *args: Any, **options: Any) -> None:
        prepare(self, *args, **options)
        self.device_type = "cpu"  # of autocast; else "cuda" where there is no accelerator

    training.Trainer.__init__ = prepare_for_the_cpu


class Losses(logging.Filter):
    """Keeps what the trainer logs; a filter, since setting up its loggers removes handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.seen.append(record.msg["train"]["loss"])
        return True


out, kind, data, model, steps = sys.argv[1:]
draft = {
    "model_type": {"eagle3": "llama", "dflash": "qwen3"}[kind],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": HIDDEN // 4,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
Path(out, "draft.json").write_text(json.dumps(draft))
flags: dict[str, object] = {
    "--speculator-type": kind,
    "--verifier-name-or-path": model,
    "--draft-config": f"{out}/draft.json",
    "--draft-attn-impl": "sdpa",
    "--loss-implementation": "eager",
    "--data-path": data,
    "--on-missing": "raise",
    "--total-seq-len": 256,  # all samples in one pack, so an epoch is a step
    "--num-workers": 0,
    "--save-path": f"{out}/checkpoints",
    "--log-dir": f"{out}/logs",
    "--epochs": steps,
    "--checkpoint-freq": steps,
    "--lr": 2e-3,
    "--scheduler-type": "none",
}
if kind == "dflash":
    flags |= {"--block-size": 4, "--max-anchors": 64, "--mask-token-id": VOCABULARY - 1}
words = [str(word) for pair in flags.items() for word in pair] + ["--target-layer-ids", "2", "30", "58"]
train_on_the_cpu()
losses = Losses()
logging.getLogger("speculators.metrics").addFilter(losses)
app(["train", *words], standalone_mode=False)
save_losses(out, losses.seen)
