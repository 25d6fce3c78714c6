"""What SGLang feeds a draft: what it reads of the draft's config, and what the target's setter makes of that.

Sources, below ``sglang/srt`` (0.5.16 and later; 0.5.15 has the same in ``ModelRunner.__init__``):
``model_executor/model_runner_components/spec_aux_hidden_state.py`` for EAGLE-3, which looks for ids in
``eagle_config`` alone, takes the target's default where there are none, and says nothing;
``speculative/dflash_utils.py`` and ``speculative/dspark_components/dspark_config.py`` for the others. Drafts of EAGLE-1
and -2 are fed the last hidden state after the final norm, the rows that ``LogitsProcessor`` gets, unless the target
hands it others (``hidden_states_before_norm``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sglang_capture.drafts.configs import DraftConfig, spread_ids
from sglang_capture.drafts.releases import holds, is_known
from sglang_capture.drafts.rules import Setter
from sglang_capture.drafts.setters import TABLE, find_setter

CLASSES: Final[dict[str, str]] = {
    "LlamaForCausalLMEagle3": "0.5.15",
    "Eagle3DeepseekV2ForCausalLM": "0.5.15",
    "LlamaForCausalLMEagle": "0.5.15",
    "Qwen2ForCausalLMEagle": "0.5.15",
    "MistralForCausalLMEagle": "0.5.15",
    "MistralLarge3ForCausalLMEagle": "0.5.15",
    "DFlashDraftModel": "0.5.15",
    "DFlashLagunaForCausalLM": "0.5.15",
    "MuseGlimmerAssistantModel": "0.5.18",
    "DFlash2DraftModel": "0.5.19",
    "DFlash2BeamDraftModel": "0.5.23",
    "MiniMaxDFlash2DraftModel": "0.5.23",
    "Qwen3DSparkModel": "0.5.16",
    "DeepseekV4ForCausalLMDSpark": "0.5.16",
    "DSparkDraftModel": "0.5.17",
    "LingDSparkModel": "0.5.19",
    "Lfm2DSparkDraftModel": "0.5.19",
    "DSparkMiniMaxDraftModel": "0.5.23",
    "LiLiCorrDraftModel": "0.5.21",
}
"""Draft classes that SGLang can load, with the first release (from the oldest in the tables) that has each."""

USUAL_CLASS: Final[dict[str, str]] = {
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLMEagle",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}

_GLIMMER_TARGETS: Final = ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration")
COUNTS_OUTPUTS: Final[dict[str, str]] = {"MuseGlimmerAssistantModel": "0.5.18", "DFlash2DraftModel": "0.5.19"}
"""Drafts to whose ids SGLang adds 1 before the setter of a Muse Glimmer gets them, and since when."""

BEFORE_NORM: Final = frozenset(
    {
        "DeepseekV4ForCausalLM",
        "InklingForConditionalGeneration",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
    }
)
"""Targets in the table of setters that may hand a draft other rows than those after the final norm."""

_DEFAULT_AUX: Final = 3
"""The hidden states that the ``fc`` of an EAGLE-3 draft takes if its config has no ids (``models/llama_eagle3.py``)."""


@dataclass(frozen=True)
class Served:
    """What a draft is fed.

    Attributes:
        indices: hidden-state indices, in the order in which the draft gets them side by side.
        last: it is fed the last hidden state, after the final norm, instead.
        why: how that follows from config and target, in words.
        unknown: why it cannot be told; the others are then empty.
        setter: the rule of the target.
        field: where in the config SGLang looks for the ids.
    """

    indices: tuple[int, ...] = ()
    last: bool = False
    why: str = ""
    unknown: str = ""
    setter: Setter | None = None
    field: str = ""


def served(draft: DraftConfig, architecture: str, layers: int, version: str) -> Served:
    """What SGLang ``version`` feeds ``draft`` when the target is an ``architecture`` of ``layers`` decoder layers."""
    if draft.kind == "mtp":
        return Served(
            unknown="a layer for multi-token prediction is part of its target; no capture is compared with it"
        )
    if draft.kind == "eagle":
        return _last("a draft of EAGLE-1 or -2", architecture, version)
    setter = find_setter(architecture, draft.kind, version)
    if isinstance(setter, str):
        return Served(unknown=setter)
    if draft.kind == "eagle3":
        return _eagle3(draft, setter, architecture, layers, version)
    return _dflash(draft, setter, architecture, layers, version)


def _last(whose: str, architecture: str, version: str) -> Served:
    if not is_known(version):
        return Served(unknown=f"what SGLang {version or '(version not recorded)'} feeds a draft is not known")
    if not any(architecture in row.architectures for row in TABLE):
        return Served(unknown=f"which last hidden state a {architecture} hands to a draft is not known")
    if architecture in BEFORE_NORM:
        return Served(unknown=f"a {architecture} may hand a draft the last hidden state before the final norm")
    return Served(last=True, why=f"{whose} is fed the last hidden state, after the final norm")


def _eagle3(draft: DraftConfig, setter: Setter, architecture: str, layers: int, version: str) -> Served:
    config = draft.raw.get("eagle_config")
    field = "eagle_config.eagle_aux_hidden_state_layer_ids"
    if isinstance(config, Mapping) and not config.get("use_aux_hidden_state", True):
        return _last("a draft with eagle_config.use_aux_hidden_state = false", architecture, version)
    written: Any = config.get("eagle_aux_hidden_state_layer_ids") if isinstance(config, Mapping) else None
    ids = tuple(written) if written is not None else None
    if setter.none:
        return Served(unknown=f"{architecture} in SGLang {version}: {setter.none}", setter=setter, field=field)
    indices = setter.indices(ids, layers)
    if list(indices) != sorted(set(indices)):
        why = f"the config names no ids ({field}), and of {layers} layers SGLang's default {list(indices)} is no choice"
        return Served(unknown=why, setter=setter, field=field)
    if ids is not None:
        why = _because(setter, ids, indices, architecture, version)
    else:
        why = f"the config names no ids where SGLang looks ({field}), so it takes its default: indices {list(indices)}"
    return Served(indices, why=why, setter=setter, field=field)


def _dflash(draft: DraftConfig, setter: Setter, architecture: str, layers: int, version: str) -> Served:
    ids, field = _dflash_ids(draft)
    why = ""
    if ids is None:
        if draft.layers is None or layers < 4:
            return Served(unknown="the config names neither layer ids nor num_hidden_layers, so no layers follow")
        ids = spread_ids(layers, draft.layers)
        why = f"the config names no ids, so SGLang spreads {list(ids)} evenly over the target; "
    if setter.none:
        return Served(unknown=f"{architecture} in SGLang {version}: {setter.none}", setter=setter, field=field)
    if refused := _refusal(setter, ids, layers, version):
        return Served(unknown=refused, setter=setter, field=field)
    since = COUNTS_OUTPUTS.get(draft.architecture)
    if since and architecture in _GLIMMER_TARGETS and holds(version, since):
        ids = tuple(number + 1 for number in ids)
        why += f"SGLang adds 1 to the ids of a {draft.architecture}; "
    indices = setter.indices(ids, layers)
    return Served(indices, why=why + _because(setter, ids, indices, architecture, version), setter=setter, field=field)


def _dflash_ids(draft: DraftConfig) -> tuple[tuple[int, ...] | None, str]:
    """The ids as SGLang looks for them, and where they are best written."""
    nested = draft.raw.get("dflash_config")
    inner = nested.get("target_layer_ids") if isinstance(nested, Mapping) else None
    top = draft.raw.get("target_layer_ids")
    found: tuple[tuple[str, Any], ...] = (("dflash_config.target_layer_ids", inner), ("target_layer_ids", top))
    if draft.kind == "dspark":
        found = (("dspark_target_layer_ids", draft.raw.get("dspark_target_layer_ids")), *found)
    for field, ids in found:
        if ids is not None:
            return tuple(ids), field
    return None, "dflash_config.target_layer_ids"


def _refusal(setter: Setter, ids: tuple[int, ...], layers: int, version: str) -> str:
    if outside := [number for number in ids if number >= layers]:
        return f"SGLang {version} refuses to start: ids {outside} are out of range for a target of {layers} layers"
    if setter.strict and list(ids) != sorted(set(ids)):
        return f"SGLang {version} refuses to start: {setter.source} wants ascending ids; found {list(ids)}"
    return ""


def _because(setter: Setter, ids: tuple[int, ...], indices: tuple[int, ...], architecture: str, version: str) -> str:
    outputs = indices == tuple(sorted({number + 1 for number in ids}))
    meaning = "outputs of layers" if outputs else "hidden-state indices"
    told = f" (the rule: {setter.ids})" if " if " in setter.ids or " unless " in setter.ids else ""
    return f"SGLang {version} takes the ids {list(ids)} of a {architecture} as {meaning}{told}: indices {list(indices)}"


def fc_inputs(draft: DraftConfig) -> int:
    """For how many hidden states SGLang builds ``fc`` (``models/llama_eagle3.py``, ``models/dflash.py``)."""
    if draft.kind == "eagle3":
        if draft.num_aux is not None and draft.architecture != "Eagle3DeepseekV2ForCausalLM":
            return draft.num_aux
        config = draft.raw.get("eagle_config")
        ids = config.get("eagle_aux_hidden_state_layer_ids") if isinstance(config, Mapping) else None
        if ids is None and draft.architecture == "Eagle3DeepseekV2ForCausalLM":
            ids = draft.raw.get("eagle_aux_hidden_state_layer_ids")
        return len(ids) if ids else _DEFAULT_AUX
    ids = _dflash_ids(draft)[0]
    return len(ids) if ids is not None else draft.layers or 1
