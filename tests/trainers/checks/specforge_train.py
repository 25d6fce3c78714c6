"""OUT ALGORITHM DATA MODEL STEPS: ``specforge train`` itself, on the CPU.

Nothing is replaced; what a GPU would do otherwise is set by SpecForge's own settings:

- SPECFORGE_DEVICE=cpu; NO_SHARD, since FSDP refuses a CPU; sdpa, since flex attention has no backward there;
- TRITON_INTERPRET=1: its EAGLE-3 loss is a Triton kernel; TORCHDYNAMO_DISABLE=1: compiling takes longer than training.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"SPECFORGE_DEVICE": "cpu", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}

from record import save_printed_losses
from specforge.cli import main

HIDDEN, VOCABULARY, LAYERS = 128, 512, 61


def draft_config(algorithm: str) -> dict[str, Any]:
    """The smallest draft of its kind for the tiny model."""
    common = {
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": HIDDEN // 4,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }
    if algorithm == "eagle3":
        return common | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": VOCABULARY,
        }
    heads: dict[str, dict[str, Any]] = {
        "dflash": {},
        "domino": {"projector_type": "domino", "emb_dim": 32, "gru_hidden_dim": 32},
        "dspark": {"projector_type": "dspark", "markov_rank": 16, "attention_mode": "mha"},
    }
    names = {"dflash": "DFlashDraftModel", "domino": "DominoDraftModel", "dspark": "DSparkDraftModel"}
    return common | {
        "architectures": [names[algorithm]],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "block_size": 4,
        "num_target_layers": LAYERS,
        "dflash_config": {"target_layer_ids": [1, 29, 57], "mask_token_id": VOCABULARY - 1, **heads[algorithm]},
    }


def run_config(out: str, algorithm: str, data: str, model: str, steps: int) -> dict[str, Any]:
    return {
        "run_id": "check",
        "output_dir": f"{out}/run",
        "model": {"target_model_path": model, "draft_model_config": f"{out}/draft.json"},
        "data": {
            "hidden_states_path": data,
            "max_length": 4096,
            "cache_dir": f"{out}/cache",
            "dataloader_num_workers": 0,
        },
        "training": {
            "strategy": algorithm,
            "num_epochs": steps,
            "max_steps": steps,
            "batch_size": 4,
            "learning_rate": 4e-3,
            "lr_scheduler": "constant",
            "ttt_length": 1,
            "num_anchors": 16,
            "attention_backend": "sdpa",
            "fsdp_sharding": "NO_SHARD",
            "log_interval": 1,
        },
    }


out, algorithm, data, model, steps = sys.argv[1:]
Path(out, "draft.json").write_text(json.dumps(draft_config(algorithm)))
Path(out, "run.json").write_text(json.dumps(run_config(out, algorithm, data, model, int(steps))))


def train() -> None:
    code = main(["train", "--config", f"{out}/run.json"])
    if code:
        sys.exit(code)


save_printed_losses(out, train)
