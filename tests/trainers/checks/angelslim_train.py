"""OUT KIND DATA MODEL STEPS TOOLS: ``tools/train_{eagle3,dflash}_offline.py`` itself, on the CPU.

EAGLE-3 needs nothing replaced. DFlash takes a GPU for granted in two places: its trainer loads embeddings and head to
"cuda", and makes a BlockMask, which only flex attention understands, whatever attention was asked for.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ |= {"ACCELERATE_USE_CPU": "true"}

import torch
from record import save_printed_losses

out, kind, data, model, steps, tools = sys.argv[1:]
torch.manual_seed(0)  # the tools make the draft before any seed is set
draft: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
}
flags: dict[str, object] = {
    "--target_model_name_or_path": model,
    "--draft_model_config_path": f"{out}/draft.json",
    "--train_hidden_path": data,
    "--output_dir": f"{out}/run",
    "--num_train_epochs": steps,  # 4 samples, 4 a step
    "--per_device_train_batch_size": 4,
    "--learning_rate": 2e-3,
    "--lr_scheduler_type": "constant",
    "--logging_steps": 1,
    "--save_strategy": "no",
    "--chat_template_type": "qwen3",
    "--num_proc": 1,
}


def train_dflash_on_the_cpu() -> None:
    from angelslim.compressor.speculative.train.trainer import online_dflash_trainer as trainer

    load = trainer.TargetEmbeddingsAndHead.from_pretrained.__func__
    trainer.TargetEmbeddingsAndHead.from_pretrained = classmethod(
        lambda cls, *args, **options: load(cls, *args, **options | {"device": "cpu"})
    )
    trainer.create_block_mask = dense_mask


def dense_mask(mask: Any, *, B: int, H: None, Q_LEN: int, KV_LEN: int, device: Any) -> torch.Tensor:  # noqa: N803
    """What the BlockMask would say, as booleans ``[B, 1, Q, KV]``."""
    queries, keys = torch.arange(Q_LEN, device=device)[:, None], torch.arange(KV_LEN, device=device)[None]
    return torch.stack([mask(sample, 0, queries, keys).expand(Q_LEN, KV_LEN) for sample in range(B)])[:, None]


if kind == "eagle3":
    draft |= {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "llama",
        "draft_vocab_size": 512,
        "target_model_type": "llama",
    }
    flags |= {"--training_time_test_length": 2, "--lm_head_key": "lm_head.weight"}
    flags |= {"--embed_weight_key": "model.embed_tokens.weight"}
else:
    draft |= {
        "architectures": ["QwenDFlashDraftModel"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": 4,
        "num_anchors": 16,
        "loss_decay_gamma": 7.0,
        "num_target_layers": 61,
        "attention_backend": "sdpa",
        "dflash_config": {"target_layer_ids": [1, 29, 57], "mask_token_id": 511},
    }
    flags |= {"--attention_backend": "sdpa"}
    train_dflash_on_the_cpu()
Path(out, "draft.json").write_text(json.dumps(draft))
script = f"{tools}/train_{kind}_offline.py"
sys.argv = [script, *(str(word) for pair in flags.items() for word in pair)]
save_printed_losses(out, lambda: runpy.run_path(script, run_name="__main__"))
