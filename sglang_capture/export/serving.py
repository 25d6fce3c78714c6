"""What a draft's config must say so that the server feeds the draft the layers it was trained on.

Trainers ignore ``eagle_config.eagle_aux_hidden_state_layer_ids`` and SGLang obeys it, by a rule that depends on the
target (``set_eagle3_layers_to_capture`` in its ``models/``, read in 0.5.23). Most families add 1 to each id, so they
want outputs of layers; some take the ids as they are, unless the first is 1. A draft that is fed other layers than it
was trained on gives no error, only hardly any accepted tokens.
"""

from __future__ import annotations

from typing import Final

from sglang_capture.layers import eagle3_layers, output_of
from sglang_capture.spec import CaptureSpec

_AS_GIVEN: Final = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
    }
)
"""Targets whose ids SGLang takes as hidden-state indices, and moves by 1 if the first id is 1."""


def sglang_eagle3_ids(spec: CaptureSpec) -> list[int] | None:
    """The ``eagle_aux_hidden_state_layer_ids`` with which SGLang feeds a draft ``spec.layers``; ``None`` if none do."""
    if spec.architecture not in _AS_GIVEN:
        return [index - 1 for index in spec.layers] if spec.layers[0] > 0 else None
    return list(spec.layers) if spec.layers[0] != 1 else None


def eagle3_serving_note(spec: CaptureSpec) -> str:
    """The same, in words."""
    ids = sglang_eagle3_ids(spec)
    if ids is None:
        return (
            f"SGLang has no setting that feeds a draft the indices {list(spec.layers)} of a {spec.architecture}: "
            "a draft trained on them cannot be served by it"
        )
    return (
        f'for serving by SGLang, put "eagle_aux_hidden_state_layer_ids": {ids} into the eagle_config of the draft '
        f"(so it is for {spec.architecture}); without it SGLang feeds the draft the indices "
        f"{list(eagle3_layers(spec.num_layers))}"
    )


def dflash_serving_note(spec: CaptureSpec) -> str:
    """What a DFlash draft's config must say; ``set_dflash_layers_to_capture`` adds 1 to each id, for every target."""
    return (
        f'the dflash_config of the draft must say "target_layer_ids": {list(output_of(spec.layers))}, outputs of '
        f"layers (hidden-state indices {list(spec.layers)}), for training and for serving by SGLang"
    )
