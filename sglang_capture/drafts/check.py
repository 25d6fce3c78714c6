"""Whether a draft will be fed, when SGLang serves it, what a dataset trained it on.

A draft that is fed other hidden states than it was trained on gives no error, only hardly any accepted tokens. So each
fact that must fit is a :class:`Finding`: the same, different (with what to do), or not to be told, which is no OK.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, Field

from sglang_capture.drafts.configs import DraftConfig
from sglang_capture.drafts.findings import Finding, finding
from sglang_capture.drafts.loading import check_loading
from sglang_capture.drafts.norms import check_norms
from sglang_capture.drafts.served import Served, fc_inputs, served
from sglang_capture.drafts.sizes import compare_sizes
from sglang_capture.drafts.trainers import Trainer, trainer_of
from sglang_capture.spec import CaptureSpec


class CheckReport(BaseModel):
    """All that was compared."""

    kind: str = Field(description="eagle3, dflash, dspark, eagle or mtp")
    trainer: str = Field(description="whose reading rule the last hidden state was compared by; empty if nobody's")
    architecture: str = Field(description="the target's")
    sglang_version: str
    trained_on: list[int] = Field(description="hidden-state indices of the dataset")
    fed: list[int] | None = Field(description="hidden-state indices that the draft is fed; null if that cannot be told")
    findings: list[Finding]

    @property
    def fits(self) -> bool:
        """Whether everything is the same; what cannot be told is not."""
        return all(each.state == "same" for each in self.findings)


def check_draft(draft: DraftConfig, spec: CaptureSpec, *, version: str = "", trainer: str | None = None) -> CheckReport:
    """Compare ``draft``, served by SGLang, with captures of ``spec``.

    Args:
        draft: its config, and the shapes of its weights if they are there.
        spec: of the dataset, or of an export.
        version: the SGLang that serves it; by default the one that captured.
        trainer: by whose rule the files are read; by default as the config tells.
    """
    version = version or spec.sglang_version
    feeding = served(draft, spec.architecture, spec.num_layers, version)
    reader = trainer_of(draft, trainer)
    known = bool(feeding.indices) and not feeding.unknown
    return CheckReport(
        kind=draft.kind,
        trainer=reader.name if reader else "",
        architecture=spec.architecture,
        sglang_version=version,
        trained_on=list(spec.layers),
        fed=list(feeding.indices) if known else None,
        findings=[
            *check_loading(draft, spec, version, feeding),
            *_layers(draft, spec, feeding),
            *_meaning(draft, spec),
            *_fc(draft, spec, feeding),
            *check_norms(draft, version),
            *_norm(draft, spec, reader, feeding),
            *compare_sizes(draft, spec),
        ],
    )


def _layers(draft: DraftConfig, spec: CaptureSpec, feeding: Served) -> Iterator[Finding]:
    trained = spec.layers
    if feeding.unknown:
        yield Finding(
            what="hidden states",
            state="unknown",
            expected=f"indices {list(trained)}, as the dataset holds them",
            found=feeding.unknown,
            remedy="give a release whose rules are known with --sglang-version, or see for yourself (docs/drafts.md)",
        )
    elif feeding.last:
        if draft.kind != "eagle":
            yield finding(
                "hidden states", False, f"indices {list(trained)}", feeding.why, "remove use_aux_hidden_state"
            )
    else:
        same = feeding.indices == trained
        found = feeding.why if same else f"{difference(trained, feeding.indices, spec.num_layers)}. {feeding.why}"
        yield finding("hidden states", same, f"indices {list(trained)}", found, _layers_remedy(spec, feeding))
        if draft.ids is not None and list(draft.ids) != sorted(set(draft.ids)):
            yield finding(
                "order of the ids",
                False,
                "ascending, each once: a target hands its hidden states over in the order of its layers",
                str(list(draft.ids)),
                f"write {sorted(set(draft.ids))}, and train on hidden states in that order",
            )


def difference(trained: Sequence[int], fed: Sequence[int], layers: int) -> str:
    """How two lists of indices differ, in words."""
    told = [f"trained on {list(trained)}, fed {list(fed)}"]
    if len(trained) != len(fed):
        told.append(f"{len(trained)} hidden states against {len(fed)}")
    elif len(set(moved := [b - a for a, b in zip(trained, fed, strict=True)])) == 1:
        told.append(f"each is {abs(moved[0])} too {'late' if moved[0] > 0 else 'early'}")
    else:
        told += [
            f"place {place}: {_name(b, layers)} instead of {_name(a, layers)}"
            for place, (a, b) in enumerate(zip(trained, fed, strict=True), start=1)
            if a != b
        ]
    if (0 in trained) != (0 in fed):
        told.append("the token embeddings (index 0) are only " + ("trained on" if 0 in trained else "fed"))
    if layers in fed:
        told.append(
            f"index {layers} is the output of the last layer before the final norm, which no dataset has as a layer"
        )
    return "; ".join(told)


def _name(index: int, layers: int) -> str:
    if index == 0:
        return "the token embeddings"
    return "the last layer's output" if index == layers else f"index {index}"


def _layers_remedy(spec: CaptureSpec, feeding: Served) -> str:
    ways = []
    ids = feeding.setter.ids_for(spec.layers, spec.num_layers) if feeding.setter else None
    if ids is not None:
        ways.append(f"to serve what was trained on, write {feeding.field} = {list(ids)}")
    else:
        ways.append(f"no ids feed a draft the indices {list(spec.layers)}: it cannot be served as it was trained")
    if all(index < spec.num_layers for index in feeding.indices):
        ways.append(
            "to train on what is served, capture with "
            f"SGLANG_CAPTURE_LAYERS={','.join(map(str, feeding.indices))} and train anew"
        )
    return "; ".join(ways)


def _meaning(draft: DraftConfig, spec: CaptureSpec) -> Iterator[Finding]:
    """A config that its trainer made speaks of the data too: vLLM serves speculators' drafts by it."""
    meant = draft.meant(spec.num_layers)
    if draft.trainer != "speculators" or draft.ids is None or meant is None:
        return
    yield finding(
        "ids of the trainer",
        meant == spec.layers,
        f"indices {list(spec.layers)}",
        f"{draft.ids_field} = {list(draft.ids)}, as speculators counts indices {list(meant)}",
        f"write {list(spec.layers)}, or capture with SGLANG_CAPTURE_LAYERS={','.join(map(str, meant))}",
    )


def _fc(draft: DraftConfig, spec: CaptureSpec, feeding: Served) -> Iterator[Finding]:
    if draft.kind in ("eagle", "mtp"):
        return
    hidden = spec.hidden_size
    shape = draft.shape("fc.weight")
    if shape is not None:
        width = len(spec.layers) * hidden
        yield finding(
            "width of fc in the weights",
            shape[-1] == width,
            f"{len(spec.layers)} layers of {hidden} = {width}",
            str(shape[-1]),
            f"capture {shape[-1] / hidden:g} layers for this draft, or train it anew",
        )
    if feeding.indices and (built := fc_inputs(draft)) != len(feeding.indices):
        yield finding(
            "width of fc in SGLang",
            False,
            f"{len(feeding.indices)} hidden states, as many as are fed",
            f"SGLang builds fc for {built}",
            f"name {len(feeding.indices)} ids in {feeding.field}, and the same number in num_aux_hidden_states",
        )


def _norm(draft: DraftConfig, spec: CaptureSpec, reader: Trainer | None, feeding: Served) -> Iterator[Finding]:
    if reader is None:
        if draft.kind != "mtp":
            yield Finding(
                what="last hidden state",
                state="unknown",
                expected=spec.last_hidden,
                found=f"what the trainer of a {draft.kind} draft needs is not known",
                remedy="name another trainer with --trainer",
            )
        return
    if reader.needs == "none":
        return
    wanted = ("post", "pre") if reader.needs == "either" else (reader.needs,)
    held = {"both": ("post", "pre"), "none": ()}.get(spec.last_hidden, (spec.last_hidden,))
    side = {"post": "after", "pre": "before"}
    why = {"post": "as it stands", "pre": "and norms it itself"}
    yield finding(
        "last hidden state",
        any(kind in held for kind in wanted),
        " or ".join(f"{kind} ({reader.name} reads it {side[kind]} the final norm, {why[kind]})" for kind in wanted),
        f"{spec.last_hidden} in the dataset",
        f"capture with SGLANG_CAPTURE_LAST_HIDDEN={wanted[0]} (or both); trained on the other one, the draft learns "
        "wrong targets and no trainer notices",
    )
