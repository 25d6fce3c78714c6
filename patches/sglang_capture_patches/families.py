"""What is known of each family of models whose decoder layers take a capture keyword: the one table, as data.

A family is named by the SGLang class that holds its layers, below ``sglang.srt.models``. Tests read it against released
wheels: each class there whose ``forward`` takes a keyword is in this table, from the release on that it says, and
docs/models.md says the same as it does. ``python -m sglang_capture_patches.families NAME…`` prints those of the names
that were proved, for `sglang-capture doctor`.

The keyword given to layer ``i`` hands over the residual stream that enters it, which is hidden-state index ``i``; the
final norm sees the last hidden state. Where reading SGLang's source shows anything else, the family is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

GATHERED = "captured_last_layer_outputs"
"""Takes an accumulator with ``capture`` and ``append``; it gets the rows as the layer's attention reads them: all."""

PRODUCED = "capture_output"
"""Takes a callable; it gets the rows as the layer before handed them on."""

KEYWORDS = (GATHERED, PRODUCED)
"""In the order of preference: where rows are scattered over ranks, the first is still whole."""

State = Literal["proved", "expected", "refused"]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        holder: module and class of the model that holds the layers.
        layers: the classes of its decoder layers, likewise; others may be derived from them.
        keywords: each keyword that they take, with the first release (from the oldest supported one) that has it.
        models: what is known under this name.
        proved: SGLang's classes of whole models whose rows were compared with transformers, on the real engine.
        refused: why it cannot be captured from.
        note: what to know where it is captured from.
        norm: the attribute with the final norm.
    """

    holder: str
    layers: tuple[str, ...]
    keywords: dict[str, str]
    models: str
    proved: tuple[str, ...] = ()
    refused: str = ""
    note: str = ""
    norm: str = "norm"

    @property
    def since(self) -> str:
        """The first release whose layers take a keyword."""
        return min(self.keywords.values(), key=lambda version: [int(part) for part in version.split(".")])

    def state(self, model: str) -> State:
        """What is known of this family in a model of SGLang's class ``model``."""
        if self.refused:
            return "refused"
        return "proved" if model in self.proved else "expected"


_HYBRID = "linear attention does not start on the CPU test bed"
_FUSED_LAST = "where a fused kernel takes the place of the final norm, captures of the last hidden state fail"
_STREAMS = "hyper-connections: several residual streams, no one hidden state between layers"

FAMILIES = (
    Family(
        "deepseek_v2.DeepseekV2Model",
        ("deepseek_v2.DeepseekV2DecoderLayer",),
        {GATHERED: "0.5.15"},
        "DeepSeek-V2, -V3, -R1, -V3.2, -VL2, Kimi-K2, Kimi-K2.5, Kimi-VL, Mistral Large 3, GLM-5",
        proved=(
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "KimiK25ForConditionalGeneration",
            "KimiVLForConditionalGeneration",
            "MistralLarge3ForCausalLM",
        ),
        note=(
            "Kimi-VL with text alone; Mistral Large 3 in bfloat16, which is all that SGLang runs it in; sparse "
            "attention (DeepSeek-V3.2, GLM-5) does not start on the CPU test bed"
        ),
    ),
    Family(
        "llama.LlamaModel",
        ("llama.LlamaDecoderLayer",),
        {PRODUCED: "0.5.22"},
        "Llama; Mistral, Ministral, Phi-3, InternLM3, TeleFLM",
        proved=("LlamaForCausalLM",),
    ),
    Family(
        "qwen3.Qwen3Model",
        ("qwen3.Qwen3DecoderLayer",),
        {PRODUCED: "0.5.21"},
        "Qwen3 (dense)",
        proved=("Qwen3ForCausalLM",),
    ),
    Family(
        "qwen3_moe.Qwen3MoeModel",
        ("qwen3_moe.Qwen3MoeDecoderLayer",),
        {GATHERED: "0.5.15", PRODUCED: "0.5.21"},
        "Qwen3 (MoE); Mellum",
        proved=("Qwen3MoeForCausalLM",),
    ),
    Family(
        "qwen2.Qwen2Model",
        ("qwen2.Qwen2DecoderLayer",),
        {PRODUCED: "0.5.22"},
        "Qwen2, Qwen2.5 (dense), also below -VL, InternVL and others; MiMo",
        proved=("Qwen2ForCausalLM",),
    ),
    Family(
        "glm4_moe.Glm4MoeModel",
        ("glm4_moe.Glm4MoeDecoderLayer",),
        {PRODUCED: "0.5.21"},
        "GLM-4.5, -4.6 (MoE)",
        proved=("Glm4MoeForCausalLM",),
    ),
    Family("apertus.ApertusModel", ("apertus.ApertusDecoderLayer",), {PRODUCED: "0.5.22"}, "Apertus"),
    Family("arcee.ArceeModel", ("arcee.ArceeDecoderLayer",), {PRODUCED: "0.5.22"}, "Arcee AFM"),
    Family(
        "bailing_moe.BailingMoEModel",
        ("bailing_moe.BailingMoEBlock",),
        {GATHERED: "0.5.15", PRODUCED: "0.5.21"},
        "Ling and Ring (Bailing MoE)",
    ),
    Family(
        "bailing_moe_v3.BailingMoELinearModel",
        ("bailing_moe_v3.BailingMoELinearDecoderLayer",),
        {PRODUCED: "0.5.21"},
        "Ling 3 (Bailing MoE, linear)",
        note=_HYBRID,
    ),
    Family("exaone_moe.ExaoneMoEModel", ("exaone_moe.ExaoneMoEDecoderLayer",), {PRODUCED: "0.5.22"}, "EXAONE MoE"),
    Family(
        "gemma4_causal.Gemma4TextModel",
        ("gemma4_causal.Gemma4DecoderLayer",),
        {PRODUCED: "0.5.22"},
        "Gemma 4",
        note="index 0 is the scaled embedding, as in transformers",
    ),
    Family("glm4.Glm4Model", ("glm4.Glm4DecoderLayer",), {PRODUCED: "0.5.22"}, "GLM-4 (dense)"),
    Family(
        "glm4_moe_lite.Glm4MoeLiteModel",
        ("glm4_moe_lite.Glm4MoeLiteDecoderLayer",),
        {PRODUCED: "0.5.21"},
        "GLM-4.7-Flash",
    ),
    Family(
        "glm5_next.Glm5NextModel",
        ("glm5_next.Glm5NextDecoderLayer",),
        {PRODUCED: "0.5.21"},
        "GLM-5 Next",
        refused=_STREAMS,
    ),
    Family("gpt_oss.GptOssModel", ("gpt_oss.GptOssDecoderLayer",), {PRODUCED: "0.5.21"}, "gpt-oss"),
    Family(
        "granitemoehybrid.GraniteMoeHybridModel",
        (
            "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer",
            "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer",
        ),
        {PRODUCED: "0.5.22"},
        "Granite 4 (hybrid)",
        note=f"index 0 is the scaled embedding, as in transformers; {_HYBRID}",
    ),
    Family(
        "interns2_mobius.InternS2MobiusForCausalLM",
        ("interns2_mobius.InternS2MobiusLinearDecoderLayer", "interns2_mobius.InternS2MobiusAttentionDecoderLayer"),
        {GATHERED: "0.5.18"},
        "Intern-S2 Mobius",
        note=_HYBRID,
    ),
    Family("laguna.LagunaModel", ("laguna.LagunaDecoderLayer",), {PRODUCED: "0.5.21"}, "Laguna"),
    Family(
        "lfm2.Lfm2Model",
        ("lfm2.Lfm2DecoderLayer",),
        {GATHERED: "0.5.19"},
        "LFM2",
        note="short convolutions do not start on the CPU test bed",
        norm="embedding_norm",
    ),
    Family(
        "lfm2_moe.Lfm2MoeModel",
        ("lfm2_moe.Lfm2MoeDecoderLayer",),
        {GATHERED: "0.5.19"},
        "LFM2 (MoE)",
        note="short convolutions do not start on the CPU test bed",
        norm="embedding_norm",
    ),
    Family("llama4.Llama4Model", ("llama4.Llama4DecoderLayer",), {PRODUCED: "0.5.21"}, "Llama 4"),
    Family("mimo_v2.MiMoV2Model", ("mimo_v2.MiMoV2DecoderLayer",), {GATHERED: "0.5.20"}, "MiMo-V2"),
    Family("minimax_m2.MiniMaxM2Model", ("minimax_m2.MiniMaxM2DecoderLayer",), {GATHERED: "0.5.15"}, "MiniMax-M2"),
    Family(
        "minimax_m3.MiniMaxM3Model",
        ("minimax_m3.MiniMaxM3DecoderLayer",),
        {GATHERED: "0.5.16"},
        "MiniMax-M3",
        note=_FUSED_LAST,
    ),
    Family(
        "nanbeige.NanbeigeModel",
        ("nanbeige.NanbeigeDecoderLayer",),
        {PRODUCED: "0.5.22"},
        "Nanbeige (looped)",
        refused="its layers run several times for one token, so an index names several states",
    ),
    Family("qwen2_moe.Qwen2MoeModel", ("qwen2_moe.Qwen2MoeDecoderLayer",), {GATHERED: "0.5.15"}, "Qwen2 (MoE)"),
    Family(
        "qwen3_5.Qwen3_5ForCausalLM",
        ("qwen3_5.Qwen3_5LinearDecoderLayer", "qwen3_5.Qwen3_5AttentionDecoderLayer"),
        {GATHERED: "0.5.15"},
        "Qwen3.5 (dense and MoE)",
        note=f"{_HYBRID}; {_FUSED_LAST}",
    ),
    Family(
        "qwen3_next.Qwen3NextModel",
        ("qwen3_next.Qwen3HybridLinearDecoderLayer", "qwen3_next.Qwen3HybridAttentionDecoderLayer"),
        {GATHERED: "0.5.15"},
        "Qwen3-Next",
        note=_HYBRID,
    ),
    Family(
        "qwen3_vl.Qwen3LLMModel",
        ("qwen3.Qwen3DecoderLayer",),
        {PRODUCED: "0.5.21"},
        "Qwen3-VL (dense)",
        note="image rows of the indices 1 to 3 include the deepstack embeddings; those of transformers do not",
    ),
    Family(
        "qwen3_vl_moe.Qwen3MoeLLMModel",
        ("qwen3_moe.Qwen3MoeDecoderLayer",),
        {GATHERED: "0.5.15", PRODUCED: "0.5.21"},
        "Qwen3-VL (MoE), Intern-S1 Pro",
        note="image rows of the indices 1 to 3 include the deepstack embeddings; those of transformers do not",
    ),
)
"""The proved first, then by name."""

_BY_HOLDER = {family.holder: family for family in FAMILIES}
_PACKAGE = "sglang.srt.models."


def family_of(holder: type) -> tuple[Family | None, bool]:
    """The family of a class that holds layers, and whether the class is the one of the table or derived from it."""
    for cls in holder.__mro__:
        family = _BY_HOLDER.get(f"{cls.__module__.removeprefix(_PACKAGE)}.{cls.__name__}")
        if family is not None:
            return family, cls is holder
    return None, False


if __name__ == "__main__":
    print("\n".join(name for name in sys.argv[1:] if any(name in family.proved for family in FAMILIES)))
