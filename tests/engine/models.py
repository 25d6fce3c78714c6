"""Small random models of several families, in the form in which such models are published: SGLang serves and
transformers loads the same files. The same call gives the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_capture.tiny_model import make_tiny_model
from sglang_capture.tiny_tokenizer import BOS, EOS, PAD, VOCAB_SIZE, write_tokenizer

HIDDEN = 128
POSITIONS = 4096
EXPERTS = 8
CODE = 3
"""Hidden dimensions that routers read: 2 ** 3 experts. (Why: `sglang_capture.tiny_model`.)"""

IMAGE_ID = 6
"""Kimi's placeholder: among the control tokens, where no drawn prompt has it."""

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

_KIMI_VISION = {
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "text_hidden_size": HIDDEN,
    "mm_hidden_size": 64,
    "mm_projector_type": "patchmerger",
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    # SGLang reads these names …
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
    # … and transformers these.
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "pos_emb_time": 4,
}

_KIMI_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
<|{{ message['role'] }}|>
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- else -%}<|media_pad|>{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def make_model(directory: Path, family: str) -> Path:
    """One of `CONFIGS`, by transformers' own class of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = CONFIGS[family]
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    _draw_anew(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    _write_json(directory / "config.json", config)
    write_tokenizer(directory, max_length=POSITIONS)
    return directory


def make_kimi(directory: Path, *, layers: int = 6) -> Path:
    """Kimi-K2.5: the tiny DeepSeek-V3 with a vision tower before it, under the published checkpoints' names."""
    make_tiny_model(directory, layers=layers)
    text = json.loads((directory / "config.json").read_text())
    _write_json(directory / "config.json", _kimi_config(text))
    weights = directory / "model-00001-of-00001.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    tensors.update(_kimi_vision_weights(torch.Generator().manual_seed(1)))
    save_file(tensors, weights, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(tensors), weights.name)}
    _write_json(directory / "model.safetensors.index.json", index)
    bring_processor(directory)
    return directory


def bring_processor(directory: Path) -> None:
    """What a Kimi of either kind needs for images: a placeholder, a template that knows it, and code to cut pixels."""
    _put_placeholder_into_tokenizer(directory / "tokenizer.json")
    (directory / "chat_template.jinja").write_text(_KIMI_CHAT_TEMPLATE)
    shutil.copy(Path(__file__).with_name("kimi_processor.py"), directory / "kimi_processor.py")
    processor = {
        "auto_map": {
            "AutoProcessor": "kimi_processor.TinyKimiProcessor",
            "AutoImageProcessor": "kimi_processor.TinyKimiVision",
        },
        "image_processor_type": "TinyKimiVision",
    }
    _write_json(directory / "preprocessor_config.json", processor)


def _kimi_config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "ignore_index": -100,
        "media_placeholder_token_id": IMAGE_ID,
        "image_token_id": IMAGE_ID,
        "video_token_id": VOCAB_SIZE,
        "projection_hidden_size": _KIMI_VISION["hidden_size"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": _KIMI_VISION,
    }


def _draw_anew(model: nn.Module, generator: torch.Generator) -> None:
    """Weights in which nothing is without effect: norms that are not all ones, attention that sees positions."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.75 + 0.5 * torch.rand(parameter.shape, generator=generator))
            elif "embed" in name:
                parameter.copy_(_uniform(parameter.shape, 0.3, generator))
                signs = torch.randint(0, 2, (len(parameter), CODE), generator=generator)
                parameter[:, :CODE] = (signs * 2.0 - 1.0) * 0.3
            else:
                parameter.copy_(_uniform(parameter.shape, 0.6 / parameter.shape[-1] ** 0.5, generator))
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


def _kimi_vision_weights(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, width = _KIMI_VISION["hidden_size"], _KIMI_VISION["intermediate_size"]

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", _uniform((rows, columns), 0.6 / columns**0.5, generator)
        yield f"{name}.bias", _uniform((rows,), 0.05, generator)

    def norm(name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", 0.75 + 0.5 * torch.rand(hidden, generator=generator)
        yield f"{name}.bias", _uniform((hidden,), 0.05, generator)

    tower, merged = "vision_tower", 4 * hidden
    yield f"{tower}.patch_embed.proj.weight", _uniform((hidden, 3, 14, 14), 0.05, generator)
    yield f"{tower}.patch_embed.proj.bias", _uniform((hidden,), 0.05, generator)
    yield f"{tower}.patch_embed.pos_emb.weight", _uniform((8, 8, hidden), 0.3, generator)
    for number in range(_KIMI_VISION["num_hidden_layers"]):
        block = f"{tower}.encoder.blocks.{number}"
        yield from norm(f"{block}.norm0")
        yield from norm(f"{block}.norm1")
        yield from linear(f"{block}.wqkv", 3 * hidden, hidden)
        yield from linear(f"{block}.wo", hidden, hidden)
        yield from linear(f"{block}.mlp.fc0", width, hidden)
        yield from linear(f"{block}.mlp.fc1", hidden, width)
    yield from norm(f"{tower}.encoder.final_layernorm")
    yield from norm("mm_projector.pre_norm")
    yield from linear("mm_projector.proj.0", merged, merged)
    weight = _uniform((HIDDEN, merged), 0.1 / merged**0.5, generator)
    bias = torch.zeros(HIDDEN)
    weight[:CODE], bias[:CODE] = 0, 0.1  # all image tokens have one code, and so a router's clear decision
    yield "mm_projector.proj.2.weight", weight
    yield "mm_projector.proj.2.bias", bias


def _put_placeholder_into_tokenizer(path: Path) -> None:
    """``<|media_pad|>`` takes the id of a byte's letter, which moves to where the last pair of letters was."""
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    by_id = {number: token for token, number in model["vocab"].items()}
    del model["vocab"][by_id[VOCAB_SIZE - 1]]
    model["merges"].pop()
    model["vocab"][by_id[IMAGE_ID]] = VOCAB_SIZE - 1
    added = {**tokenizer["added_tokens"][-1], "id": IMAGE_ID, "content": "<|media_pad|>"}
    model["vocab"][added["content"]] = IMAGE_ID
    tokenizer["added_tokens"].append(added)
    path.write_text(json.dumps(tokenizer))


def _uniform(shape: Any, std: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) - 0.5) * (12**0.5 * std)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
