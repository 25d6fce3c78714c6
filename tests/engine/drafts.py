"""Draft models for the tiny target: small, the same for the same target, and right often enough to be accepted.

A random draft of 512 tokens is right once in 512 times, and verification that never accepts anything proves little. The
tiny target's residual stream is mostly the embedding of its token, so `lm_head(norm(embedding))` alone guesses the next
token about two times in five. Both drafts make that guess, with enough of the target's hidden states mixed in that
other hidden states would give other drafts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AUX_LAYERS = (0, 2, 4)
"""Hidden-state indices that the EAGLE-3 draft is fed with. SGLang adds 1 to ids that begin with 1, so these do not."""

_EMBEDDING = 0.1
"""The size of the target's embeddings; a norm makes it 1."""
_SHARP = 1.6
"""Queries and keys are an embedding times this: attention then sees hardly anything but its own position."""
_HEADS = 4


def add_mtp_layer(target: Path, directory: Path) -> None:
    """Copy the tiny target of 6 layers, with a layer for multi-token prediction behind its last: a copy of that one."""
    shutil.copytree(target, directory)
    config, weights = _load(target)
    hidden, layer = config["hidden_size"], config["num_hidden_layers"]
    last, mtp = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    added = {name.replace(last, mtp): tensor for name, tensor in weights.items() if name.startswith(last)}
    identity = torch.eye(hidden)
    added |= {
        f"{mtp}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{mtp}enorm.weight": torch.ones(hidden),
        f"{mtp}hnorm.weight": torch.ones(hidden),
        f"{mtp}eh_proj.weight": torch.cat([_EMBEDDING * identity, 0.2 * _EMBEDDING * identity], dim=1),
        f"{mtp}shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{mtp}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    file = "mtp.safetensors"
    save_file(added, directory / file, metadata={"format": "pt"})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def make_eagle3_draft(target: Path, directory: Path) -> None:
    """An EAGLE-3 draft of one layer, fed with the hidden states of `AUX_LAYERS`.

    At each position attention copies the token's own embedding, and ``fc`` adds some of what the target's layers made
    of the token before.
    """
    directory.mkdir(parents=True)
    config, weights = _load(target)
    hidden = config["hidden_size"]
    save_file(_eagle3_weights(hidden, weights), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_eagle3_config(config)))


def _eagle3_weights(hidden: int, target: dict[str, Tensor]) -> dict[str, Tensor]:
    identity, nothing = torch.eye(hidden), torch.zeros(hidden, hidden)
    mlp = torch.zeros(2 * hidden, hidden)
    return {
        "fc.weight": torch.cat([-0.5 * identity, nothing, 0.75 * identity], dim=1),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        # The left half reads the embedding, the right half the hidden state.
        "midlayer.self_attn.q_proj.weight": torch.cat([_SHARP * identity, nothing], dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat([_SHARP * identity, nothing], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([identity, nothing], dim=1),
        "midlayer.self_attn.o_proj.weight": _EMBEDDING * identity,
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.mlp.gate_proj.weight": mlp,
        "midlayer.mlp.up_proj.weight": mlp.clone(),
        "midlayer.mlp.down_proj.weight": mlp.T.contiguous(),
        "norm.weight": target["model.norm.weight"].clone(),
        "lm_head.weight": target["lm_head.weight"].clone(),
    }


def _eagle3_config(target: dict[str, Any]) -> dict[str, Any]:
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": hidden // _HEADS,
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "target_hidden_size": hidden,
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": target["bos_token_id"],
        "eos_token_id": target["eos_token_id"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "use_aux_hidden_state": True},
    }


def _load(target: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    for file in sorted(target.glob("*.safetensors")):
        weights |= load_file(file)
    return json.loads((target / "config.json").read_text()), weights
