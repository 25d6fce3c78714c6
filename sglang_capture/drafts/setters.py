"""Which hidden states SGLang takes from a target for a draft: by architecture, algorithm and release, as data.

For a draft that wants hidden states of the target's layers, SGLang calls one method of the target's class with the ids
of the draft's config (:data:`~sglang_capture.drafts.rules.SETTERS`). What an id means is up to that method, and to
where the loop over the layers looks at what it set: both differ between models, and between releases. A
:class:`~sglang_capture.drafts.rules.Setter` says what comes out of both: hidden-state indices.

Tests run each method's own source, taken out of the released wheels, and compare.
"""

from __future__ import annotations

from typing import Final

from sglang_capture.drafts.releases import NEWEST, OLDEST, holds, is_known
from sglang_capture.drafts.rules import SETTERS, Algorithm, Setter

DSPARK_SINCE: Final = "0.5.16"
"""The first release with DSPARK (``setup_aux_hidden_states`` in ``attention_backend_setup.py``)."""

_LLAMA = (
    "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "TeleFLMForCausalLM",
)
_DEEPSEEK = (
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "MistralLarge3ForCausalLM",
)
_GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
_QWEN35_VL = (
    "InternS2PreviewForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
_QWEN35_TEXT = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_QWEN3_VL_MOE = ("InternS1ProForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
_MIMO = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")
_NEMOTRON = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
_NEMOTRON_VL = ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3")
_GLIMMER = ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration")
_MINICPM = ("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration")
_QWEN3_VL = "qwen3_vl.Qwen3VLForConditionalGeneration"

_NO_FLAG = "this release sets a list that the loop over the layers does not look at, so nothing is captured"
_STREAMS = "hyper-connections: several residual streams, and what is handed over is made of them"
_LOOPED = "its layers run several times for one token, and ids count the runs"
_NO_RESIDUAL = "this release hands over the output of the layer's MLP without the residual stream"
_NOT_THERE = "its language model lacks the method, so the server stops with an AttributeError"
_BANK = "with attention over earlier layers' outputs, a mixture of them is handed over"
_CONVOLUTION = "what is handed over precedes the layer's last convolution"
_MINDSPORE = "the model is in another package (MindSpore)"

TABLE: Final[tuple[Setter, ...]] = (
    Setter("eagle3", _DEEPSEEK, "outputs if the first is 1", "deepseek_v2.DeepseekV2ForCausalLM"),
    Setter("eagle3", ("Glm4MoeLiteForCausalLM",), "outputs if the first is 1", "glm4_moe_lite.Glm4MoeLiteForCausalLM"),
    Setter(
        "eagle3",
        ("KimiK25ForConditionalGeneration",),
        "outputs if the first is 1",
        "kimi_k25.KimiK25ForConditionalGeneration",
    ),
    Setter("eagle3", ("GptOssForCausalLM",), "outputs", "gpt_oss.GptOssForCausalLM", until="0.5.17"),
    Setter(
        "eagle3",
        ("GptOssForCausalLM",),
        "outputs unless the greatest is n",
        "gpt_oss.GptOssForCausalLM",
        since="0.5.17",
    ),
    Setter("eagle3", _LLAMA, "outputs", "llama.LlamaForCausalLM"),
    Setter("eagle3", ("ApertusForCausalLM",), "outputs", "apertus.ApertusForCausalLM"),
    Setter(
        "eagle3",
        ("BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"),
        "outputs",
        "bailing_moe.BailingMoEForCausalLM",
    ),
    Setter("eagle3", ("ExaoneMoEForCausalLM",), "outputs", "exaone_moe.ExaoneMoEForCausalLM"),
    Setter("eagle3", ("ExaoneMoeForCausalLM",), "outputs", "exaone_moe.ExaoneMoEForCausalLM", since="0.5.22"),
    Setter("eagle3", ("Gemma3ForCausalLM",), "outputs", "gemma3_causal.Gemma3ForCausalLM", until="0.5.17"),
    Setter(
        "eagle3",
        ("Gemma3ForCausalLM",),
        "outputs",
        "gemma3_causal.Gemma3ForCausalLM",
        since="0.5.17",
        none=_NO_RESIDUAL,
    ),
    Setter(
        "eagle3",
        ("Gemma3ForConditionalGeneration",),
        "outputs",
        "gemma3_mm.Gemma3ForConditionalGeneration",
        until="0.5.17",
    ),
    Setter(
        "eagle3",
        ("Gemma3ForConditionalGeneration",),
        "outputs",
        "gemma3_mm.Gemma3ForConditionalGeneration",
        since="0.5.17",
        none=_NO_RESIDUAL,
    ),
    Setter("eagle3", ("Gemma4ForCausalLM",), "outputs", "gemma4_causal.Gemma4ForCausalLM"),
    Setter("eagle3", _GEMMA4, "outputs", "gemma4_mm.Gemma4ForConditionalGeneration"),
    Setter("eagle3", ("Glm4MoeForCausalLM",), "outputs", "glm4_moe.Glm4MoeForCausalLM"),
    Setter(
        "eagle3",
        ("Glm5NextForConditionalGeneration",),
        "outputs",
        "glm5_next.Glm5NextForConditionalGeneration",
        since="0.5.20",
        none=_STREAMS,
    ),
    Setter("eagle3", ("Llama4ForConditionalGeneration",), "outputs", "mllama4.Llama4ForConditionalGeneration"),
    Setter("eagle3", ("LongcatFlashForCausalLM",), "outputs", "longcat_flash.LongcatFlashForCausalLM"),
    Setter("eagle3", ("MindSporeForCausalLM",), "outputs", "mindspore.MindSporeForCausalLM", none=_MINDSPORE),
    Setter("eagle3", ("MiniMaxM2ForCausalLM",), "outputs", "minimax_m2.MiniMaxM2ForCausalLM"),
    Setter(
        "eagle3",
        ("MiniMaxM3SparseForCausalLM",),
        "outputs",
        "minimax_m3.MiniMaxM3SparseForCausalLM",
        since="0.5.16",
        until="0.5.18",
        none=_NO_FLAG,
    ),
    Setter(
        "eagle3",
        ("MiniMaxM3SparseForCausalLM",),
        "outputs",
        "minimax_m3.MiniMaxM3SparseForCausalLM",
        since="0.5.18",
    ),
    Setter(
        "eagle3",
        ("MiniMaxM3SparseForConditionalGeneration",),
        "outputs",
        "minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration",
        since="0.5.18",
        default_added=1,
    ),
    Setter("eagle3", ("Qwen2ForCausalLM",), "outputs", "qwen2.Qwen2ForCausalLM"),
    Setter("eagle3", ("Qwen2MoeForCausalLM",), "outputs", "qwen2_moe.Qwen2MoeForCausalLM"),
    Setter(
        "eagle3", ("Qwen2_5_VLForConditionalGeneration",), "outputs", "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration"
    ),
    Setter("eagle3", ("Qwen3ForCausalLM",), "outputs", "qwen3.Qwen3ForCausalLM"),
    Setter("eagle3", ("Qwen3MoeForCausalLM",), "outputs", "qwen3_moe.Qwen3MoeForCausalLM"),
    Setter("eagle3", ("MellumForCausalLM",), "outputs", "qwen3_moe.Qwen3MoeForCausalLM", since="0.5.16"),
    Setter("eagle3", ("Qwen3NextForCausalLM",), "outputs", "qwen3_next.Qwen3NextForCausalLM"),
    Setter("eagle3", ("Qwen3VLForConditionalGeneration", *_QWEN3_VL_MOE), "outputs", _QWEN3_VL),
    Setter("eagle3", ("Cosmos3ForConditionalGeneration",), "outputs", _QWEN3_VL, since="0.5.20"),
    Setter("eagle3", _QWEN35_VL, "outputs", _QWEN3_VL, until="0.5.22", none=_NO_FLAG),
    Setter(
        "eagle3",
        ("InternS2MobiusForConditionalGeneration",),
        "outputs",
        _QWEN3_VL,
        since="0.5.18",
        until="0.5.22",
        none=_NO_FLAG,
    ),
    Setter("eagle3", (*_QWEN35_VL, "InternS2MobiusForConditionalGeneration"), "outputs", _QWEN3_VL, since="0.5.22"),
    Setter("eagle3", ("Qwen4ExpForConditionalGeneration",), "outputs", _QWEN3_VL, since="0.5.20", none=_STREAMS),
    Setter("eagle3", _QWEN35_TEXT, "outputs", "qwen3_5_text.Qwen3_5ForCausalLM", since="0.5.22"),
    Setter("dflash", _DEEPSEEK, "outputs", "deepseek_v2.DeepseekV2ForCausalLM"),
    Setter("dflash", ("Glm4MoeLiteForCausalLM",), "outputs", "glm4_moe_lite.Glm4MoeLiteForCausalLM"),
    Setter("dflash", ("KimiK25ForConditionalGeneration",), "outputs", "kimi_k25.KimiK25ForConditionalGeneration"),
    Setter("dflash", ("GptOssForCausalLM",), "outputs", "gpt_oss.GptOssForCausalLM"),
    Setter("dflash", _LLAMA, "outputs", "llama.LlamaForCausalLM"),
    Setter("dflash", ("BeamForCausalLM",), "outputs", "beam.BeamForCausalLM", since="0.5.23", strict=True),
    Setter("dflash", ("Gemma4ForCausalLM",), "outputs", "gemma4_causal.Gemma4ForCausalLM"),
    Setter("dflash", _GEMMA4, "outputs", "gemma4_mm.Gemma4ForConditionalGeneration"),
    Setter(
        "dflash",
        ("Glm5NextForConditionalGeneration",),
        "outputs",
        "glm5_next.Glm5NextForConditionalGeneration",
        since="0.5.20",
        none=_STREAMS,
    ),
    Setter(
        "dflash",
        ("InklingForConditionalGeneration",),
        "outputs",
        "inkling.InklingForConditionalGeneration",
        since="0.5.17",
        strict=True,
        none=_CONVOLUTION,
    ),
    Setter(
        "dflash",
        ("KimiK3ForConditionalGeneration",),
        "outputs",
        "kimi_k3.KimiK3ForConditionalGeneration",
        since="0.5.21",
        none=_BANK,
    ),
    Setter(
        "dflash",
        ("KimiK3LinearForCausalLM",),
        "outputs",
        "kimi_k3.KimiK3LinearForCausalLM",
        since="0.5.21",
        none=_BANK,
    ),
    Setter("dflash", ("LagunaForCausalLM",), "outputs", "laguna.LagunaForCausalLM"),
    Setter("dflash", ("Lfm2ForCausalLM",), "outputs", "lfm2.Lfm2ForCausalLM", since="0.5.19"),
    Setter("dflash", ("Lfm2MoeForCausalLM",), "outputs", "lfm2_moe.Lfm2MoeForCausalLM", since="0.5.19"),
    Setter(
        "dflash",
        ("Lfm2VlForConditionalGeneration",),
        "outputs",
        "lfm2_vl.Lfm2VlForConditionalGeneration",
        since="0.5.21",
    ),
    Setter("dflash", _MIMO, "outputs", "mimo_v2.MiMoV2ForCausalLM", since="0.5.20"),
    Setter("dflash", _MINICPM, "outputs", "minicpmv.MiniCPMV4_6", since="0.5.23"),
    Setter(
        "dflash",
        ("MiniMaxM3SparseForConditionalGeneration",),
        "outputs",
        "minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration",
        since="0.5.23",
        strict=True,
    ),
    Setter("dflash", _GLIMMER, "indices", "muse_glimmer.MuseGlimmerForCausalLM", since="0.5.18"),
    Setter(
        "dflash",
        ("MuseSparkForConditionalGeneration",),
        "outputs",
        "muse_spark.MuseSparkTextForCausalLM",
        since="0.5.23",
    ),
    Setter(
        "dflash",
        ("NanbeigeForCausalLM",),
        "outputs",
        "nanbeige.NanbeigeForCausalLM",
        since="0.5.20",
        none=_LOOPED,
    ),
    Setter("dflash", _NEMOTRON, "outputs", "nemotron_h.NemotronHForCausalLM", since="0.5.19"),
    Setter("dflash", _NEMOTRON_VL, "outputs", "nano_nemotron_vl.NemotronH_Nano_VL_V2", since="0.5.20"),
    Setter("dflash", ("Qwen3ForCausalLM",), "outputs", "qwen3.Qwen3ForCausalLM"),
    Setter("dflash", ("Qwen3MoeForCausalLM",), "outputs", "qwen3_moe.Qwen3MoeForCausalLM"),
    Setter("dflash", ("MellumForCausalLM",), "outputs", "qwen3_moe.Qwen3MoeForCausalLM", since="0.5.16"),
    Setter("dflash", ("Qwen3NextForCausalLM",), "outputs", "qwen3_next.Qwen3NextForCausalLM"),
    Setter("dflash", (*_QWEN3_VL_MOE, *_QWEN35_VL), "outputs", _QWEN3_VL),
    Setter("dflash", ("InternS2MobiusForConditionalGeneration",), "outputs", _QWEN3_VL, since="0.5.18"),
    Setter("dflash", ("Qwen3VLForConditionalGeneration",), "outputs", _QWEN3_VL, none=_NOT_THERE),
    Setter("dflash", ("Cosmos3ForConditionalGeneration",), "outputs", _QWEN3_VL, since="0.5.20", none=_NOT_THERE),
    Setter("dflash", ("Qwen4ExpForConditionalGeneration",), "outputs", _QWEN3_VL, since="0.5.20", none=_STREAMS),
    Setter("dflash", _QWEN35_TEXT, "indices", "qwen3_5_text.Qwen3_5ForCausalLM", since="0.5.18", until="0.5.22"),
    Setter("dflash", _QWEN35_TEXT, "outputs", "qwen3_5_text.Qwen3_5ForCausalLM", since="0.5.22", strict=True),
    Setter(
        "dspark",
        ("BailingMoeV3ForCausalLM",),
        "outputs",
        "bailing_moe_v3.BailingMoeV3ForCausalLM",
        since="0.5.19",
    ),
    Setter(
        "dspark",
        ("DeepseekV4ForCausalLM",),
        "outputs",
        "deepseek_v4.DeepseekV4ForCausalLM",
        since="0.5.16",
        none=_STREAMS,
    ),
    Setter(
        "dspark",
        ("KimiK3ForConditionalGeneration",),
        "outputs",
        "kimi_k3.KimiK3ForConditionalGeneration",
        since="0.5.17",
        none=_BANK,
    ),
    Setter(
        "dspark",
        ("KimiK3LinearForCausalLM",),
        "outputs",
        "kimi_k3.KimiK3LinearForCausalLM",
        since="0.5.19",
        none=_BANK,
    ),
    Setter("dspark", ("KimiLinearForCausalLM",), "outputs", "kimi_linear.KimiLinearForCausalLM", since="0.5.17"),
    Setter(
        "dspark",
        ("MiniMaxM3SparseForConditionalGeneration",),
        "outputs",
        "minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration",
        since="0.5.23",
    ),
)


def find_setter(architecture: str, algorithm: Algorithm, version: str) -> Setter | str:
    """The row for a target, or why there is none, in words."""
    if not is_known(version):
        named = version or "(version not recorded)"
        return f"the rules of SGLang {named} are not known: those of {OLDEST} to {NEWEST} are"
    if algorithm == "dspark" and not holds(version, DSPARK_SINCE):
        return f"SGLang {version} has no DSPARK yet: it came with {DSPARK_SINCE}"
    wanted = ("dspark", "dflash") if algorithm == "dspark" else (algorithm,)
    for name in wanted:
        for row in TABLE:
            if row.algorithm == name and architecture in row.architectures and holds(version, row.since, row.until):
                return row
    if any(architecture in row.architectures for row in TABLE):
        return f"{architecture} has no {SETTERS[algorithm]} in SGLang {version}: it cannot be a target of such a draft"
    return (
        f"no model of SGLang {version} that is called {architecture} is known to have {SETTERS[algorithm]}: "
        "either the model cannot be a target of such a draft, or it is not one of SGLang's own"
    )
