"""A small random DeepSeek-V3: a real architecture, real file formats, and weights that cost nothing.

For the demo and the tests. SGLang serves it and transformers loads it, from the same files, without a download; the
same arguments give the same bytes, so a test may rely on what it computes. Three things are not as a plain random
initialisation would have them, each because a test would be blind or flaky otherwise:

- norm weights vary around one, else a swapped or forgotten norm changes nothing;
- attention is sharp enough to depend on positions, else a wrong position changes nothing;
- the router reads a code in the first few hidden dimensions, which the embedding of each token holds and no layer
  writes to. A plain random router ties now and then (40,000 decisions a prompt), and where it does, rounding alone
  picks another expert and changes the row by a quarter: no tolerance of a comparison would be honest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_capture.errors import UsageError
from sglang_capture.tiny_tokenizer import BOS, EOS, PAD, VOCAB_SIZE, write_tokenizer

MARKER = "tiny_model.json"
"""The file that names the arguments a model was made with; it is written last, so it vouches for the others."""

_WEIGHTS = "model-00001-of-00001.safetensors"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HEADS = 4
_NOPE, _ROPE, _VALUE = 32, 16, 32
_Q_RANK, _KV_RANK = 48, 32
_EXPERTS = 8
_CODE = 3
"""Hidden dimensions the router reads: one bit for the group, two for the experts (2 ** 3 experts)."""
_CODE_SIZE = 0.1
_CODE_LOGIT = 2.0

# What a matrix does to the size of its input. Small, so that 61 random layers neither blow up rounding errors (1e-6 in
# float32, 2 % in bfloat16) nor blur all positions into one; each layer changes the residual stream by about a tenth.
_EMBEDDING = 0.1
_GAIN = 0.25
_GAIN_ATTENTION = 0.6
_GAIN_LATENT = 1.1
_GAIN_OUTPUT = 0.06
_GAIN_ROUTER = 0.05


class TinyModelError(UsageError, ValueError):
    """No model of these sizes can be made, or not here."""


def make_tiny_model(
    directory: Path, *, layers: int = 61, hidden: int = 128, seed: int = 0, dtype: str = "float32"
) -> None:
    """Write the model into ``directory``, or leave one that was made with the same arguments as it is.

    About 16 million parameters for the default sizes: 64 MB in float32.

    Raises:
        TinyModelError: an argument is out of range, or the directory holds something else.
    """
    _check(layers, hidden, dtype)
    arguments = {"format": 1, "layers": layers, "hidden": hidden, "seed": seed, "dtype": dtype}
    if directory.exists() and _holds(directory, arguments):
        return
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(layers, hidden, dtype)
    tensors = {name: tensor.to(_DTYPES[dtype]) for name, tensor in _weights(config, seed)}
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    _write_json(directory / "model.safetensors.index.json", _index(tensors))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    write_tokenizer(directory, max_length=config["max_position_embeddings"])
    _write_json(directory / MARKER, arguments)


def _check(layers: int, hidden: int, dtype: str) -> None:
    if layers < 1:
        raise TinyModelError(f"layers must be 1 or more, not {layers}")
    if hidden < 32 or hidden % 16:
        raise TinyModelError(f"hidden must be a multiple of 16, 32 or more, not {hidden}")
    if dtype not in _DTYPES:
        raise TinyModelError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")


def _holds(directory: Path, arguments: dict[str, Any]) -> bool:
    """True for a model of these arguments, False for an empty directory."""
    if not directory.is_dir():
        raise TinyModelError(f"{directory} is a file; name a directory that is empty or does not exist")
    if not any(directory.iterdir()):
        return False
    marker = directory / MARKER
    found = marker.read_text() if marker.is_file() else None
    if found == _json(arguments):
        return True
    what = "no tiny model" if found is None else f"a tiny model made with other arguments ({' '.join(found.split())})"
    raise TinyModelError(f"{directory} is not empty and holds {what}; name another directory, or delete it first")


def _config(layers: int, hidden: int, dtype: str) -> dict[str, Any]:
    """The shape of DeepSeek-V3, scaled down; ``rope_scaling`` is spelled as the published checkpoints spell it."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * hidden,
        "kv_lora_rank": _KV_RANK,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": hidden // 2,
        "moe_layer_freq": 1,
        "n_group": 2,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": _HEADS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": _HEADS,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": _Q_RANK,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": dtype,
        "use_cache": True,
        "v_head_dim": _VALUE,
        "vocab_size": VOCAB_SIZE,
    }


class _Draw:
    """Draws weights. Uniform and not normal: uniform draws are the same bits on every CPU, normal ones are not."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int, std: float) -> torch.Tensor:
        return (torch.rand(shape, generator=self._generator) - 0.5) * (12**0.5 * std)

    def matrix(self, rows: int, columns: int, gain: float = _GAIN) -> torch.Tensor:
        return self.uniform(rows, columns, std=gain / columns**0.5)

    def into_residual(self, hidden: int, columns: int, gain: float = _GAIN) -> torch.Tensor:
        """A projection back into the residual stream, which leaves the router's code alone."""
        weight = self.matrix(hidden, columns, gain)
        weight[:_CODE] = 0
        return weight

    def norm(self, size: int) -> torch.Tensor:
        return 0.75 + 0.5 * torch.rand(size, generator=self._generator)

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=self._generator) * 2.0 - 1.0

    def order(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self._generator)


def _weights(config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under the name the published checkpoints use, in the order they are drawn."""
    draw, hidden = _Draw(seed), config["hidden_size"]
    embedding = draw.uniform(VOCAB_SIZE, hidden, std=_EMBEDDING)
    embedding[:, :_CODE] = draw.signs(VOCAB_SIZE, _CODE) * _CODE_SIZE
    yield "model.embed_tokens.weight", embedding
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", draw.norm(hidden)
        yield from _attention(draw, f"{prefix}.self_attn", hidden)
        yield f"{prefix}.post_attention_layernorm.weight", draw.norm(hidden)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(draw, f"{prefix}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _experts(draw, f"{prefix}.mlp", hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", draw.norm(hidden)
    yield "lm_head.weight", draw.matrix(VOCAB_SIZE, hidden)


def _attention(draw: _Draw, prefix: str, hidden: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}.q_a_proj.weight", draw.matrix(_Q_RANK, hidden)
    yield f"{prefix}.q_a_layernorm.weight", draw.norm(_Q_RANK)
    yield f"{prefix}.q_b_proj.weight", draw.matrix(_HEADS * (_NOPE + _ROPE), _Q_RANK, _GAIN_ATTENTION)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", draw.matrix(_KV_RANK + _ROPE, hidden, _GAIN_LATENT)
    yield f"{prefix}.kv_a_layernorm.weight", draw.norm(_KV_RANK)
    yield f"{prefix}.kv_b_proj.weight", draw.matrix(_HEADS * (_NOPE + _VALUE), _KV_RANK, _GAIN_ATTENTION)
    yield f"{prefix}.o_proj.weight", draw.into_residual(hidden, _HEADS * _VALUE, _GAIN_OUTPUT)


def _mlp(draw: _Draw, prefix: str, hidden: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}.gate_proj.weight", draw.matrix(width, hidden)
    yield f"{prefix}.up_proj.weight", draw.matrix(width, hidden)
    yield f"{prefix}.down_proj.weight", draw.into_residual(hidden, width)


def _experts(draw: _Draw, prefix: str, hidden: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}.gate.weight", _router(draw, hidden)
    yield f"{prefix}.gate.e_score_correction_bias", draw.uniform(_EXPERTS, std=0.01)
    for expert in range(_EXPERTS):
        yield from _mlp(draw, f"{prefix}.experts.{expert}", hidden, width)
    yield from _mlp(draw, f"{prefix}.shared_experts", hidden, width)


def _router(draw: _Draw, hidden: int) -> torch.Tensor:
    """Expert ``e`` answers to the token's code with the bits of ``e``: the first picks the group, the others the pair.

    The last bit weighs little, so the two experts that a token gets never tie with the third. Which dimension plays
    which bit, and with which sign, differs from layer to layer.
    """
    bits = (torch.arange(_EXPERTS)[:, None] >> torch.tensor([2, 1, 0])) & 1
    answer = (bits * 2.0 - 1.0) * torch.tensor([0.5, 1.0, 0.25]) * draw.signs(_CODE)
    weight = draw.matrix(_EXPERTS, hidden, _GAIN_ROUTER)
    weight[:, :_CODE] = (answer * _CODE_LOGIT)[:, draw.order(_CODE)]
    return weight


def _index(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), _WEIGHTS)}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(_json(value))
