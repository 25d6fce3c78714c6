"""Models that hold SGLang's DeepSeek-V2 under other names: the tiny ones, dressed as published checkpoints are."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.kimi import IMAGE_ID, bring_processor
from sglang_capture.tiny_tokenizer import BOS, EOS, PAD

_VISION = {
    "model_type": "moonvit",
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}

_MISTRAL_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    r"model\.(layers\.\d+)\.input_layernorm": r"\1.attention_norm",
    r"model\.(layers\.\d+)\.post_attention_layernorm": r"\1.ffn_norm",
    r"model\.(layers\.\d+)\.self_attn\.q_(a|b)_proj": r"\1.attention.wq_\2",
    r"model\.(layers\.\d+)\.self_attn\.(q|kv)_a_layernorm": r"\1.attention.\2_a_norm",
    r"model\.(layers\.\d+)\.self_attn\.kv_a_proj_with_mqa": r"\1.attention.wkv_a_with_mqa",
    r"model\.(layers\.\d+)\.self_attn\.kv_b_proj": r"\1.attention.wkv_b",
    r"model\.(layers\.\d+)\.self_attn\.o_proj": r"\1.attention.wo",
    r"model\.(layers\.\d+)\.mlp\.gate": r"\1.gate",
    r"model\.(layers\.\d+)\.mlp\.((?:experts\.\d+|shared_experts)\.)gate_proj": r"\1.\2w1",
    r"model\.(layers\.\d+)\.mlp\.((?:experts\.\d+|shared_experts)\.)down_proj": r"\1.\2w2",
    r"model\.(layers\.\d+)\.mlp\.((?:experts\.\d+|shared_experts)\.)up_proj": r"\1.\2w3",
    r"model\.(layers\.\d+)\.mlp\.gate_proj": r"\1.feed_forward.w1",
    r"model\.(layers\.\d+)\.mlp\.down_proj": r"\1.feed_forward.w2",
    r"model\.(layers\.\d+)\.mlp\.up_proj": r"\1.feed_forward.w3",
}


def make_kimi_vl(directory: Path, text: Path) -> Path:
    """Kimi-VL around the DeepSeek-V2 in ``text``; its vision tower has whatever weights SGLang makes up."""
    config, tensors = _copied(directory, text)
    wrapper = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "media_placeholder_token_id": IMAGE_ID,
        "text_config": config,
        "vision_config": _VISION,
    }
    bring_processor(directory)
    return _written(directory, wrapper, {f"language_model.{name}": tensor for name, tensor in tensors.items()})


def make_mistral_large_3(directory: Path, text: Path) -> Path:
    """Mistral Large 3, which is the DeepSeek-V3 in ``text`` with Mistral's names for its weights."""
    config, tensors = _copied(directory, text)
    renamed = {_mistral_name(name): tensor for name, tensor in tensors.items()}
    return _written(directory, {**config, "architectures": ["MistralLarge3ForCausalLM"]}, renamed)


def _mistral_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind == "e_score_correction_bias":
        return stem.removeprefix("model.").removesuffix(".mlp.gate") + ".router_biases"
    for pattern, replacement in _MISTRAL_NAMES.items():
        if re.fullmatch(pattern, stem):
            return f"{re.sub(pattern, replacement, stem)}.{kind}"
    raise KeyError(name)


def _copied(directory: Path, text: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tokenizer of ``text`` goes along; its config and its weights come back."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(text / name, directory)
    tensors = {name: tensor for path in text.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return json.loads((text / "config.json").read_text()), tensors


def _written(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
