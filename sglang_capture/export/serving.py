"""What a draft's config must say so that the server feeds the draft the layers it was trained on.

Trainers ignore ``eagle_config.eagle_aux_hidden_state_layer_ids`` and SGLang obeys it, by a rule that depends on the
target and the release (:mod:`sglang_capture.drafts.setters`). A draft that is fed other layers than it was trained on
gives no error, only hardly any accepted tokens.
"""

from __future__ import annotations

from sglang_capture.drafts.releases import NEWEST
from sglang_capture.drafts.rules import Setter
from sglang_capture.drafts.setters import find_setter
from sglang_capture.layers import output_of
from sglang_capture.spec import CaptureSpec


def sglang_eagle3_ids(spec: CaptureSpec) -> list[int] | None:
    """The ``eagle_aux_hidden_state_layer_ids`` with which SGLang feeds a draft ``spec.layers``; ``None`` if none do,
    or if that cannot be told.

    The release is the one that captured; the newest that is known, if that was not recorded.
    """
    setter = find_setter(spec.architecture, "eagle3", _release(spec))
    ids = setter.ids_for(spec.layers, spec.num_layers) if isinstance(setter, Setter) else None
    return None if ids is None else list(ids)


def eagle3_serving_note(spec: CaptureSpec) -> str:
    """The same, in words."""
    version, layers = _release(spec), list(spec.layers)
    setter = find_setter(spec.architecture, "eagle3", version)
    if isinstance(setter, str) or setter.none:
        why = setter if isinstance(setter, str) else f"SGLang {version}: {setter.none}"
        return (
            f"with which ids SGLang feeds a draft the indices {layers} of a {spec.architecture} cannot be told: {why}"
        )
    ids = sglang_eagle3_ids(spec)
    if ids is None:
        return (
            f"SGLang {version} has no setting that feeds a draft the indices {layers} of a {spec.architecture}: "
            "a draft trained on them cannot be served by it"
        )
    return (
        f'for serving by SGLang, put "eagle_aux_hidden_state_layer_ids": {ids} into the eagle_config of the draft '
        f"(so it is for {spec.architecture} in SGLang {version}); without it SGLang feeds the draft the indices "
        f"{list(setter.indices(None, spec.num_layers))}"
    )


def dflash_serving_note(spec: CaptureSpec) -> str:
    """What a DFlash draft's config must say: trainers count outputs of layers, and so does SGLang for most targets."""
    version, outputs = _release(spec), list(output_of(spec.layers))
    note = (
        f'the dflash_config of the draft must say "target_layer_ids": {outputs}, outputs of layers (hidden-state '
        f"indices {list(spec.layers)}), for training"
    )
    setter = find_setter(spec.architecture, "dflash", version)
    if isinstance(setter, str) or setter.none:
        why = setter if isinstance(setter, str) else f"SGLang {version}: {setter.none}"
        return f"{note}; what SGLang would feed it cannot be told: {why}"
    ids = setter.ids_for(spec.layers, spec.num_layers)
    if ids is None:
        return f"{note}; SGLang {version} has no ids that feed it these indices of a {spec.architecture}"
    if list(ids) == outputs:
        return f"{note} and for serving by SGLang"
    return f"{note}; for serving a {spec.architecture} by SGLang {version} it must say {list(ids)}"


def _release(spec: CaptureSpec) -> str:
    return spec.sglang_version or NEWEST
