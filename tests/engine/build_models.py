"""Run as a program (by test_inner_models.py): builds models of SGLang's own classes without weights or a server, and
prints as JSON what is found in each to tap. Its argument is a model directory that any server would take."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import sglang.srt.runtime_context as context
import torch
import transformers
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.server_args import ServerArgs
from sglang_capture_patches.search import UnknownModelError, find_inner

from engine.models import CONFIGS

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
LINEAR = {
    "full_attention_interval": 4,
    "linear_num_value_heads_cpu": 32,
    "linear_num_key_heads_cpu": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
DEEPSEEK = CONFIGS["deepseek_v2"]
SPARSE = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 16,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "q_lora_rank": 48,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def sglang(module: str, name: str) -> Any:
    return getattr(import_module(f"sglang.srt.{module}"), name)


def plain(module: str, name: str, config: str, **more: Any) -> Callable[[], Any]:
    """A language model whose config transformers knows."""
    return lambda: sglang(f"models.{module}", name)(config=getattr(transformers, config)(**SMALL, **more))


def kimi_vl() -> Any:
    vision = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    config = sglang("configs.kimi_vl", "KimiVLConfig")(text_config=DEEPSEEK, vision_config=vision)
    config.encoder_only = config.language_only = False  # what a server's arguments set
    return sglang("models.kimi_vl", "KimiVLForConditionalGeneration")(config)


def deepseek_vl2() -> Any:
    config = sglang("configs.deepseekvl2", "DeepseekVL2Config")(
        tile_tag="2D", language_config=DEEPSEEK, projector_config={"n_embed": 128}
    )
    return sglang("models.deepseek_vl2", "DeepseekVL2ForCausalLM")(config)


def qwen3_vl(module: str, name: str, config_name: str) -> Any:
    config = getattr(transformers, config_name)(text_config=SMALL, vision_config=VISION)
    for key, value in config.text_config.to_dict().items():  # as SGLang's loader of configs does
        if not hasattr(config, key):
            setattr(config, key, value)
    return sglang(f"models.{module}", name)(config)


def mllama() -> Any:
    vision = {"num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 4, "hidden_size": 64}
    config = transformers.MllamaConfig(text_config={**SMALL, "cross_attention_layers": [1]}, vision_config=vision)
    config.pad_token_id = 0
    return sglang("models.mllama", "MllamaForConditionalGeneration")(config)


def llama4() -> Any:
    config = transformers.Llama4Config(
        text_config={**SMALL, "num_local_experts": 4, "intermediate_size_mlp": 64},
        vision_config={
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    )
    return sglang("models.mllama4", "Llama4ForConditionalGeneration")(config)


def hybrid(config_module: str, config_name: str, module: str, name: str) -> Callable[[], Any]:
    return lambda: sglang(f"models.{module}", name)(sglang(f"configs.{config_module}", config_name)(**SMALL, **LINEAR))


def looped() -> Any:
    return sglang("models.nanbeige", "NanbeigeForCausalLM")(sglang("configs.nanbeige", "NanbeigeConfig")(**SMALL))


CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}

BUILDERS: dict[str, Callable[[], Any]] = {
    "kimi_vl": kimi_vl,
    "deepseek_vl2": deepseek_vl2,
    "mistral_large_3": lambda: sglang("models.mistral_large_3", "MistralLarge3ForCausalLM")(
        transformers.DeepseekV3Config(**DEEPSEEK)
    ),
    "deepseek_v3.2": lambda: sglang("models.deepseek_v2", "DeepseekV32ForCausalLM")(
        transformers.DeepseekV3Config(**{**DEEPSEEK, **SPARSE})
    ),
    "qwen3_next": hybrid("qwen3_next", "Qwen3NextConfig", "qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5": hybrid("qwen3_5", "Qwen3_5TextConfig", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_vl": lambda: qwen3_vl("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VLConfig"),
    "qwen3_vl_moe": lambda: qwen3_vl("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig"),
    "gpt_oss": plain("gpt_oss", "GptOssForCausalLM", "GptOssConfig", num_local_experts=8),
    "lfm2": plain("lfm2", "Lfm2ForCausalLM", "Lfm2Config", **CONVOLUTIONS),
    "llama4": llama4,
    "mllama": mllama,
    "nanbeige": looped,
    "gemma3": plain("gemma3_causal", "Gemma3ForCausalLM", "Gemma3TextConfig"),
}


def main() -> None:
    _prepare(sys.argv[1])
    for name, build in BUILDERS.items():
        with torch.device("meta"):
            model = build()
        print(json.dumps([name, _found(model)]), flush=True)


def _prepare(model_path: str) -> None:
    """What a scheduler does before it builds its model."""
    operations = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in (
        "sigmoid_mul",
        "qk_gemma_rmsnorm",
        "qk_gemma_rmsnorm_with_gate",
        "qkvzba_split_reshape_cat_contiguous",
    ):
        operations.define(f"fused_{name}_cpu(Tensor x) -> Tensor")  # Qwen3.5 looks them up when it is imported
    torch.cuda.current_device = lambda: torch.device("meta")  # linear attention asks where its buffers go
    arguments = ServerArgs(model_path=model_path, device="cpu", attention_backend="torch_native", dtype="float32")
    context.publish(arguments, role="scheduler", ranks=context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))
    _prepare.operations = operations  # type: ignore[attr-defined]  # they go with it


def _found(model: Any) -> dict[str, Any]:
    try:
        inner = find_inner(model)
    except UnknownModelError as error:
        return {"refused": str(error)}
    names = {id(module): name for name, module in model.named_modules()}
    return {
        "layers": names[id(inner.layers)],
        "norm": names[id(inner.norm)],
        "keyword": inner.keyword,
        "held": [inner.held.start, inner.held.stop],
        "state": inner.state,
    }


if __name__ == "__main__":
    main()
