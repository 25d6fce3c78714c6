"""Whether SGLang can load a draft by its ``config.json``: a class it has, and the fields that it reads at the top.

Sources: transformers' ``AutoConfig``, which looks for ``model_type`` at the top and fills sizes that are not there with
its own defaults; ``models/llama_eagle3.py`` of 0.5.15 to 0.5.23, which multiplies with ``target_hidden_size`` where the
config has such a field, null or not, and fails without ``draft_vocab_size``, which may be null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sglang_capture.drafts.configs import DraftConfig
from sglang_capture.drafts.findings import Finding, finding
from sglang_capture.drafts.releases import OLDEST, holds, is_known
from sglang_capture.drafts.served import CLASSES, USUAL_CLASS, Served
from sglang_capture.spec import CaptureSpec

LLAMA_EAGLE3: Final = "LlamaForCausalLMEagle3"
SIZES: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_NESTED: Final = "transformer_layer_config"
"""Where speculators keeps the draft's decoder."""


def class_served(draft: DraftConfig) -> str:
    """The class that SGLang makes of the draft: the one it names, or the one that it is told to name."""
    return draft.architecture if draft.architecture in CLASSES else USUAL_CLASS[draft.kind]


def check_loading(draft: DraftConfig, spec: CaptureSpec, version: str, feeding: Served) -> Iterator[Finding]:
    """What keeps SGLang ``version`` from loading the draft; nothing for a release that is not known."""
    if draft.kind == "mtp" or not is_known(version):
        return
    lacks = list(_lacks(draft, version))
    if isinstance(draft.raw.get(_NESTED), Mapping) and "model_type" not in draft.raw:
        yield _as_speculators_writes_it(draft, spec, version, feeding)
        return
    yield _class(draft, version)
    if draft.kind == "eagle3":
        yield from lacks or [
            finding("fields that SGLang reads", True, "all", "model_type and sizes are at the top of the config", "")
        ]


def _class(draft: DraftConfig, version: str) -> Finding:
    since = CLASSES.get(draft.architecture)
    usual = USUAL_CLASS[draft.kind]
    if since is None:
        remedy = f'write "architectures": ["{usual}"] into its config, if its weights have the names of that class'
    else:
        remedy = f"serve with SGLang {since} or later"
    return finding(
        "class of the draft",
        since is not None and holds(version, since or OLDEST),
        f"one that SGLang {version} has, as {usual}",
        draft.architecture or "none",
        remedy,
    )


def _lacks(draft: DraftConfig, version: str) -> Iterator[Finding]:
    """One finding for each field of an EAGLE-3 draft that is not as SGLang reads it."""
    raw, llama = draft.raw, class_served(draft) == LLAMA_EAGLE3
    if not isinstance(raw.get("model_type"), str):
        yield _lack(
            "model_type",
            f"a string at the top: without it SGLang {version} stops with 'Unrecognized model'",
            raw.get("model_type"),
            'write "model_type": "llama"' if llama else "write the model_type of its decoder",
        )
    for name in SIZES:
        if not _is_size(raw.get(name)):
            expected = f"a number at the top, where SGLang {version} reads it, and takes a default if there is none"
            yield _lack(name, expected, raw.get(name), f"write the draft's {name} there")
    if not llama:
        return
    if "target_hidden_size" in raw and not _is_size(raw["target_hidden_size"]):
        yield _lack(
            "target_hidden_size",
            f"a number, or no such field: SGLang {version} multiplies with it, and stops with a TypeError",
            "null" if raw["target_hidden_size"] is None else raw["target_hidden_size"],
            f"remove it, or write the target's hidden size ({draft.hidden_size or 'a number'} if it is the draft's)",
        )
    if "draft_vocab_size" not in raw and not raw.get("tie_word_embeddings"):
        yield _lack(
            "draft_vocab_size",
            f"a number, or null: without the field SGLang {version} stops with an AttributeError",
            None,
            "write the rows of its lm_head, or null if the target's head is to be taken",
        )


def _lack(name: str, expected: str, found: object, remedy: str) -> Finding:
    return finding(f"{name} in the config", False, expected, "nothing" if found is None else str(found), remedy)


def _is_size(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found > 0


def _as_speculators_writes_it(draft: DraftConfig, spec: CaptureSpec, version: str, feeding: Served) -> Finding:
    name = class_served(draft)
    steps = [
        f'"architectures": ["{name}"]',
        f"every field of {_NESTED} at the top (model_type, {', '.join(SIZES)} and the others)",
    ]
    if "target_hidden_size" in draft.raw and draft.raw["target_hidden_size"] is None:
        steps.append("no target_hidden_size, which is null here")
    ids = feeding.setter.ids_for(spec.layers, spec.num_layers) if feeding.setter else None
    if ids is not None:
        steps.append(f"{feeding.field} = {list(ids)}, for what it was trained on")
    told = "; ".join(f"({number}) {step}" for number, step in enumerate(steps, start=1))
    return finding(
        "a config that SGLang can load",
        False,
        f"model_type and sizes at the top of config.json, where SGLang {version} reads them",
        f"a config as speculators writes it, with the decoder in {_NESTED}: SGLang does not read it as written",
        f"write a config.json for SGLang beside the weights, with the other fields and: {told}; then check that one",
    )
