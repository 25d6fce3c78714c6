"""From a draft to the captures that fit it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_capture.drafts.configs import DraftConfig
from sglang_capture.drafts.loading import check_loading
from sglang_capture.drafts.served import Served, served
from sglang_capture.drafts.trainers import Trainer, trainer_of
from sglang_capture.layers import check_layers, output_of
from sglang_capture.spec import CaptureSpec, LastHidden

_LEAST = (1,)
"""A server captures at least one index; a draft of EAGLE-1 or -2 needs none."""


@dataclass(frozen=True)
class Plan:
    """What to capture for a draft.

    Attributes:
        spec: of such captures.
        trainer: by whose needs; ``None`` if nobody is known to train such drafts on captures.
        notes: why, and what to look out for.
        problems: what cannot be told, or does not fit: captures with these settings may be of no use to the draft.
    """

    spec: CaptureSpec
    trainer: Trainer | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def plan_for(draft: DraftConfig, target: CaptureSpec, *, version: str, trainer: str | None = None) -> Plan:
    """The captures of ``target`` that fit ``draft`` when SGLang ``version`` serves it.

    ``target`` says what the model is; its layers and its last hidden state are not looked at.

    Raises:
        LayerError: the target lacks a layer that the draft wants.
    """
    reader = trainer_of(draft, trainer)
    feeding = served(draft, target.architecture, target.num_layers, version)
    layers, notes = _layers(draft, target, feeding)
    check_layers(layers, target.num_layers)
    last: dict[str, LastHidden] = {"none": "none", "post": "post", "pre": "pre", "either": "post"}
    last_hidden = last[reader.needs] if reader else "post"
    if reader is not None:
        notes.append(f"last hidden state: {_needs(reader)}")
    spec = target.model_copy(update={"layers": layers, "last_hidden": last_hidden, "sglang_version": version})
    for found in check_loading(draft, spec, version, feeding):
        if found.state == "different":
            notes.append(f"SGLang {version} does not load it as it is ({found.what}: {found.found}): {found.remedy}")
    return Plan(spec, reader, tuple(notes), tuple(_problems(draft, spec, feeding, reader, trainer or draft.trainer)))


def _problems(
    draft: DraftConfig, spec: CaptureSpec, feeding: Served, reader: Trainer | None, named: str
) -> Iterator[str]:
    """What cannot be told, and what contradicts the draft or its trainer."""
    if feeding.unknown:
        yield f"what SGLang will feed it cannot be told: {feeding.unknown}"
    if reader is None and draft.kind != "mtp":
        whose = (
            f"{named} makes no {draft.kind} drafts from captures" if named else "nobody is known to make such drafts"
        )
        yield f"which last hidden state it is trained on cannot be told: {whose}; name a trainer with --trainer"
    fed = 0 if feeding.last else len(spec.layers)
    if reader is not None and reader.count not in (None, fed):
        yield f"{reader.name} trains on exactly {reader.count} layers, and this draft is fed {fed}"
    if (hidden := draft.target_hidden_size or draft.hidden_size) not in (None, spec.hidden_size):
        yield f"the draft is for hidden size {hidden}, and this target has {spec.hidden_size}: another target?"


def _layers(draft: DraftConfig, target: CaptureSpec, feeding: Served) -> tuple[tuple[int, ...], list[str]]:
    if draft.kind in ("eagle", "mtp") or feeding.last:
        why = f"{feeding.why}; " if feeding.why else ""
        return _LEAST, [f"{why}a server captures one index at least, and here it is only ballast"]
    meant = draft.meant(target.num_layers) or ()
    name = draft.trainer or "the trainers of such drafts"
    if feeding.unknown:
        return meant, [f"these are the indices that {name} mean by {draft.ids_field or 'their defaults'}"]
    outputs = [output for output in output_of(feeding.indices) if output is not None]
    notes = [feeding.why, f"these are the outputs of layers {outputs}, counted from 0"]
    if meant != feeding.indices:
        notes.append(
            f"to {name} the same config means indices {list(meant)}; what is served counts: train on the above"
        )
    return feeding.indices, notes


def _needs(reader: Trainer) -> str:
    return {
        "none": f"{reader.name} does not read it",
        "post": f"{reader.name} wants it after the final norm",
        "pre": f"{reader.name} wants it before the final norm, and norms it itself",
        "either": f"{reader.name} takes it before or after the final norm, and its files say which",
    }[reader.needs]
