"""A small Kimi-K2.5, in the form in which it is published; with it what a Kimi of any kind needs for images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models import CODE, HIDDEN, uniform, write_json
from sglang_capture.tiny_model import make_tiny_model
from sglang_capture.tiny_tokenizer import BOS, EOS, PAD, VOCAB_SIZE

IMAGE_ID = 6
"""Kimi's placeholder: among the control tokens, where no drawn prompt has it."""

_VISION = {
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

_CHAT_TEMPLATE = """\
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


def make_kimi(directory: Path, *, layers: int = 6) -> Path:
    """Kimi-K2.5: the tiny DeepSeek-V3 with a vision tower before it, under the published checkpoints' names."""
    make_tiny_model(directory, layers=layers)
    text = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", _config(text))
    weights = directory / "model-00001-of-00001.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    tensors.update(_vision_weights(torch.Generator().manual_seed(1)))
    save_file(tensors, weights, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(tensors), weights.name)}
    write_json(directory / "model.safetensors.index.json", index)
    bring_processor(directory)
    return directory


def bring_processor(directory: Path) -> None:
    """What a Kimi of either kind needs for images: a placeholder, a template that knows it, and code to cut pixels."""
    _put_placeholder_into(directory / "tokenizer.json")
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    shutil.copy(Path(__file__).with_name("kimi_processor.py"), directory / "kimi_processor.py")
    processor = {
        "auto_map": {
            "AutoProcessor": "kimi_processor.TinyKimiProcessor",
            "AutoImageProcessor": "kimi_processor.TinyKimiVision",
        },
        "image_processor_type": "TinyKimiVision",
    }
    write_json(directory / "preprocessor_config.json", processor)


def _config(text: dict[str, Any]) -> dict[str, Any]:
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
        "projection_hidden_size": _VISION["hidden_size"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": {**text, "model_type": "kimi_k2"},
        "vision_config": _VISION,
    }


def _vision_weights(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, width = _VISION["hidden_size"], _VISION["intermediate_size"]

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", uniform((rows, columns), 0.6 / columns**0.5, generator)
        yield f"{name}.bias", uniform((rows,), 0.05, generator)

    def norm(name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", 0.75 + 0.5 * torch.rand(hidden, generator=generator)
        yield f"{name}.bias", uniform((hidden,), 0.05, generator)

    tower, merged = "vision_tower", 4 * hidden
    yield f"{tower}.patch_embed.proj.weight", uniform((hidden, 3, 14, 14), 0.05, generator)
    yield f"{tower}.patch_embed.proj.bias", uniform((hidden,), 0.05, generator)
    yield f"{tower}.patch_embed.pos_emb.weight", uniform((8, 8, hidden), 0.3, generator)
    for number in range(_VISION["num_hidden_layers"]):
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
    weight = uniform((HIDDEN, merged), 0.1 / merged**0.5, generator)
    bias = torch.zeros(HIDDEN)
    weight[:CODE], bias[:CODE] = 0, 0.1  # all image tokens have one code, and so a router's clear decision
    yield "mm_projector.proj.2.weight", weight
    yield "mm_projector.proj.2.bias", bias


def _put_placeholder_into(path: Path) -> None:
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
