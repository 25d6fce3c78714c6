"""A draft's ``config.json``, of whichever trainer, as one :class:`DraftConfig`.

Trainers write the same facts under different names, and count layers differently: ``k`` is the *output of* the 0-based
layer ``k`` (hidden-state index ``k + 1``) for all but speculators, which counts as vLLM does, by what *enters* layer
``k`` (index ``k``). What SGLang reads of a config is another matter, see :mod:`.serving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sglang_capture.errors import UsageError

Kind = Literal["eagle3", "dflash", "dspark", "eagle", "mtp"]
"""What a draft is fed: hidden states of layers (the first three), or the last hidden state."""

Convention = Literal["output_of", "input_of"]

_ARCHITECTURES: Final[dict[str, tuple[Kind, str]]] = {
    "LlamaForCausalLMEagle3": ("eagle3", ""),
    "Eagle3DeepseekV2ForCausalLM": ("eagle3", ""),
    "Eagle3LlamaForCausalLM": ("eagle3", "AngelSlim"),
    "LlamaEagle3DraftModel": ("eagle3", "NeMo Automodel"),
    "Eagle3DraftModel": ("eagle3", "speculators"),
    "DFlashDraftModel": ("dflash", ""),
    "DominoDraftModel": ("dflash", "SpecForge"),
    "QwenDFlashDraftModel": ("dflash", "AngelSlim"),
    "QwenDFlareDraftModel": ("dflash", "AngelSlim"),
    "DFlashLagunaForCausalLM": ("dflash", ""),
    "MuseGlimmerAssistantModel": ("dflash", ""),
    "DFlash2DraftModel": ("dflash", ""),
    "DFlash2BeamDraftModel": ("dflash", ""),
    "MiniMaxDFlash2DraftModel": ("dflash", ""),
    "DSparkDraftModel": ("dspark", ""),
    "Qwen3DSparkModel": ("dspark", ""),
    "LingDSparkModel": ("dspark", ""),
    "Lfm2DSparkDraftModel": ("dspark", ""),
    "DSparkMiniMaxDraftModel": ("dspark", ""),
    "LiLiCorrDraftModel": ("dflash", ""),
    "DeepseekV4ForCausalLMDSpark": ("dspark", ""),
    "LlamaForCausalLMEagle": ("eagle", ""),
    "Qwen2ForCausalLMEagle": ("eagle", ""),
    "MistralForCausalLMEagle": ("eagle", ""),
    "MistralLarge3ForCausalLMEagle": ("eagle", ""),
}
"""Draft classes: the kind, and the trainer where the name tells it."""

_SPECULATORS_KINDS: Final[dict[str, Kind]] = {"eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash"}

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class DraftConfig:
    """What a draft's config says, by neutral names; ``None`` where it says nothing.

    Attributes:
        kind: what it is fed.
        trainer: who wrote the config, where it can be told; empty if not.
        architecture: the draft's own class.
        ids: layer ids as written.
        ids_field: where they were found.
        convention: what they mean to the trainer that wrote them.
        hidden_size: of the draft.
        target_hidden_size: of the target, if the config names it apart from the draft's own.
        vocab_size: of the target.
        draft_vocab_size: of the draft's own head.
        layers: decoder layers of the draft.
        target_layers: decoder layers of the target.
        num_aux: how many hidden states ``fc`` takes, where the config says so apart from the ids.
        mask_token_id: DFlash and DSpark.
        block_size: DFlash and DSpark.
        raw: the config itself.
        shapes: of the weights, by tensor name; empty if there are none to be read.
    """

    kind: Kind
    trainer: str
    architecture: str
    ids: tuple[int, ...] | None
    ids_field: str
    convention: Convention
    hidden_size: int | None
    target_hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    layers: int | None
    target_layers: int | None
    num_aux: int | None
    mask_token_id: int | None
    block_size: int | None
    raw: Mapping[str, Any]
    shapes: Shapes = field(default_factory=dict)

    def meant(self, target_layers: int) -> tuple[int, ...] | None:
        """The hidden-state indices that the ids name as their trainer counts, or its defaults; ``None`` if none do."""
        if self.kind in ("eagle", "mtp"):
            return None
        if self.ids is not None:
            # vLLM's id n is the last hidden state; speculators' files have it beside the layers.
            moved = 0 if self.convention == "input_of" else 1
            return tuple(sorted({number + moved for number in self.ids} - ({target_layers} if not moved else set())))
        if self.kind == "eagle3":
            return (2, target_layers // 2, target_layers - 3)
        return tuple(number + 1 for number in spread_ids(target_layers, self.layers or 1))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the tensor whose name ends with ``name``."""
        return next((shape for found, shape in self.shapes.items() if f".{found}".endswith(f".{name}")), None)


def spread_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The layers whose outputs a DFlash draft is fed if its config names none: evenly from 1 to ``n - 3``.

    Source: ``build_target_layer_ids`` in SGLang's ``speculative/dflash_utils.py`` and in z-lab's dflash.
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + number * span / (draft_layers - 1)) for number in range(draft_layers))


def draft_config(raw: Mapping[str, Any], shapes: Shapes | None = None) -> DraftConfig:
    """Read a draft's config.

    Args:
        raw: the JSON of its ``config.json``.
        shapes: of its weights, by name.

    Raises:
        UsageError: it is no config of a draft, or a field is not what it must be.
    """
    architecture = str(next(iter(raw.get("architectures") or [""])))
    kind, trainer = _kind(raw, architecture)
    own = _own(raw)
    ids, ids_field = _ids(raw, kind, trainer)
    target_layers = _number(raw, "target_num_hidden_layers")
    if target_layers is None and trainer != "TorchSpec":
        target_layers = _nested(raw, "num_target_layers")
    verifier = raw.get("target_model_config")
    return DraftConfig(
        kind=kind,
        trainer=trainer,
        architecture=architecture,
        ids=ids,
        ids_field=ids_field,
        convention="input_of" if trainer == "speculators" else "output_of",
        hidden_size=_number(own, "hidden_size"),
        target_hidden_size=_number(raw, "target_hidden_size"),
        vocab_size=_number(verifier if isinstance(verifier, Mapping) else own, "vocab_size"),
        draft_vocab_size=_number(raw, "draft_vocab_size"),
        layers=_number(own, "num_hidden_layers"),
        target_layers=target_layers,
        num_aux=_number(raw, "num_aux_hidden_states"),
        mask_token_id=_first(_nested(raw, "mask_token_id"), _number(raw, "dspark_noise_token_id")),
        block_size=_first(_nested(raw, "block_size"), _number(raw, "dspark_block_size")),
        raw=raw,
        shapes=shapes or {},
    )


def _kind(raw: Mapping[str, Any], architecture: str) -> tuple[Kind, str]:
    if speculator := raw.get("speculators_model_type"):
        if speculator in _SPECULATORS_KINDS:
            return _SPECULATORS_KINDS[speculator], "speculators"
        raise UsageError(f"a speculators config of type {speculator!r} is not known: eagle, eagle3 or dflash is")
    if architecture in _ARCHITECTURES:
        kind, trainer = _ARCHITECTURES[architecture]
        return kind, trainer or _trainer(raw)
    if architecture.endswith(("NextN", "MTP")) or raw.get("num_nextn_predict_layers"):
        return "mtp", ""
    if any(name in raw for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")):
        return "eagle3", _trainer(raw)
    if "dflash_config" in raw or "target_layer_ids" in raw:
        return ("dspark" if "dspark" in architecture.lower() else "dflash"), _trainer(raw)
    if raw.get("num_hidden_layers") == 1:
        return "eagle", "EAGLE"
    if "num_nextn_predict_layers" in raw:
        raise UsageError(
            f"this is a target, not a draft ({architecture or 'no class'}, without layers that draft); "
            "are the arguments swapped?"
        )
    raise UsageError(
        f"this is no config of a draft that is known (architectures: {architecture or 'none'}): expected one of EAGLE, "
        "EAGLE-3, DFlash or DSpark; name the directory of the draft, not of its target"
    )


def _trainer(raw: Mapping[str, Any]) -> str:
    """Who wrote a config whose class does not tell."""
    return "TorchSpec" if "target_num_hidden_layers" in raw else ""


def _own(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part with the draft's own shape."""
    for name in ("transformer_layer_config", "text_config"):
        if isinstance(raw.get(name), Mapping):
            return raw[name]  # type: ignore[no-any-return]
    return raw


def _ids(raw: Mapping[str, Any], kind: Kind, trainer: str) -> tuple[tuple[int, ...] | None, str]:
    names = {
        "eagle3": ("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
        "dflash": ("dflash_config.target_layer_ids", "target_layer_ids"),
        "dspark": (
            "dspark_target_layer_ids",
            "dspark_config.target_layer_ids",
            "dflash_config.target_layer_ids",
            "target_layer_ids",
        ),
    }.get(kind, ())
    if trainer == "speculators" and kind != "eagle":
        names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    for name in names:
        found: Any = raw
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return _layer_ids(name, found), name
    return None, ""


def _layer_ids(name: str, found: Any) -> tuple[int, ...]:
    numbers = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise UsageError(f"{name} must be a list of whole numbers from 0 up; found {found!r}")
    return tuple(numbers)


def _nested(raw: Mapping[str, Any], name: str) -> int | None:
    """A number that stands in ``dspark_config``, in ``dflash_config``, or beside them."""
    places = (raw.get("dspark_config"), raw.get("dflash_config"), raw, _own(raw))
    found = (_number(place, name) for place in places if isinstance(place, Mapping))
    return next((number for number in found if number is not None), None)


def _number(config: Mapping[str, Any], name: str) -> int | None:
    found = config.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise UsageError(f"{name} must be a whole number; found {found!r}")
    return found


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)
