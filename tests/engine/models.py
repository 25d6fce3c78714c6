"""Small random models of several families, in the form in which such models are published: SGLang serves and
transformers loads the same files. The same call gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_capture.tiny_tokenizer import BOS, EOS, PAD, VOCAB_SIZE, write_tokenizer

HIDDEN = 128
POSITIONS = 4096
EXPERTS = 8
CODE = 3
"""Hidden dimensions that routers read: 2 ** 3 experts. (Why: `sglang_capture.tiny_model`.)"""

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
    "type": "yarn",
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Depths differ, so that the defaults by depth do.
    "llama": {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4},
    "qwen3": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 7},
    "qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen2": {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 5},
    "glm4_moe": {
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": 8,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN // 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
    },
    # DeepSeek-V2-Lite: no low-rank queries, and a router of another kind than V3's.
    "deepseek_v2": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": HIDDEN // 2,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "rope_theta": 10000,
        "rope_scaling": _YARN,
    },
}


def make_model(directory: Path, family: str) -> Path:
    """One of `CONFIGS`, by transformers' own class of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIGS[family]
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    _draw_anew(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    write_json(directory / "config.json", config)
    write_tokenizer(directory, max_length=POSITIONS)
    return directory


def _draw_anew(model: nn.Module, generator: torch.Generator) -> None:
    """Weights in which nothing is without effect: norms that are not all ones, attention that sees positions."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.75 + 0.5 * torch.rand(parameter.shape, generator=generator))
            elif "embed" in name:
                parameter.copy_(uniform(parameter.shape, 0.3, generator))
                signs = torch.randint(0, 2, (len(parameter), CODE), generator=generator)
                parameter[:, :CODE] = (signs * 2.0 - 1.0) * 0.3
            else:
                parameter.copy_(uniform(parameter.shape, 0.6 / parameter.shape[-1] ** 0.5, generator))
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter[..., :CODE, :] = 0
            if name.endswith("mlp.gate.weight"):
                _route_by_code(parameter, generator)


def _route_by_code(weight: Tensor, generator: torch.Generator) -> None:
    """A token's code names its first expert, and no other comes near a tie for the second place."""
    bits = (torch.arange(EXPERTS)[:, None] >> torch.arange(CODE)) & 1
    signs = torch.randint(0, 2, (CODE,), generator=generator) * 2.0 - 1.0
    weight.mul_(0.05)
    weight[:, :CODE] = (bits * 2.0 - 1.0) * torch.tensor([0.25, 0.5, 1.0]) * signs


def uniform(shape: Any, std: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) - 0.5) * (12**0.5 * std)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
