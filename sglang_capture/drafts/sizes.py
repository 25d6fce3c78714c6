"""Sizes and vocabularies of a draft against those of the target."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_capture.drafts.configs import DraftConfig
from sglang_capture.drafts.findings import Finding, finding
from sglang_capture.spec import CaptureSpec


def compare_sizes(draft: DraftConfig, spec: CaptureSpec) -> Iterator[Finding]:
    """Hidden size, vocabularies, mask token and number of layers; of config and weights."""
    yield from _sizes(draft, spec)
    yield from _vocabulary(draft, spec)
    yield from _target_layers(draft, spec)


def _sizes(draft: DraftConfig, spec: CaptureSpec) -> Iterator[Finding]:
    fed_size = draft.target_hidden_size or draft.hidden_size
    if fed_size is not None:
        name = "target_hidden_size" if draft.target_hidden_size else "hidden_size"
        yield finding(
            "hidden size",
            fed_size == spec.hidden_size,
            str(spec.hidden_size),
            f"{name} = {fed_size}",
            "this is no draft of this target",
        )
    shape = draft.shape("embed_tokens.weight")
    if shape is not None and shape[0] != spec.vocab_size:
        yield finding(
            "embeddings in the weights",
            False,
            f"{spec.vocab_size} tokens",
            f"{shape[0]} of size {shape[1]}",
            "this is no draft of this target",
        )


def _vocabulary(draft: DraftConfig, spec: CaptureSpec) -> Iterator[Finding]:
    vocabulary = spec.vocab_size
    if draft.vocab_size is not None:
        yield finding(
            "vocabulary",
            draft.vocab_size == vocabulary,
            str(vocabulary),
            f"vocab_size = {draft.vocab_size}",
            "this is no draft of this target",
        )
    own = draft.draft_vocab_size
    if own is not None:
        yield finding(
            "vocabulary of the draft",
            0 < own <= vocabulary,
            f"at most {vocabulary}",
            f"draft_vocab_size = {own}",
            "choose a smaller draft vocabulary",
        )
    yield from _maps(draft, own, vocabulary)
    mask = draft.mask_token_id
    if draft.kind in ("dflash", "dspark") and mask is not None:
        yield finding(
            "mask token",
            0 <= mask < vocabulary,
            f"below {vocabulary}",
            f"mask_token_id = {mask}",
            "take a token that the target has",
        )


def _maps(draft: DraftConfig, own: int | None, vocabulary: int) -> Iterator[Finding]:
    """The sizes of the head and the maps between the two vocabularies, in the weights."""
    for name, size, of in (
        ("lm_head.weight", own or vocabulary, "draft_vocab_size" if own else "the vocabulary"),
        ("d2t", own, "draft_vocab_size"),
        ("t2d", vocabulary, "the vocabulary"),
    ):
        shape = draft.shape(name)
        if shape is not None and size is not None:
            yield finding(
                f"{name} in the weights",
                shape[0] == size,
                f"{size} ({of})",
                str(shape[0]),
                "make map, head and config of one vocabulary",
            )
    if draft.shapes and own is not None and own < vocabulary and draft.shape("d2t") is None:
        yield finding(
            "d2t in the weights",
            False,
            f"{own} entries",
            "none",
            "add the map: without it SGLang takes draft ids for the target's",
        )


def _target_layers(draft: DraftConfig, spec: CaptureSpec) -> Iterator[Finding]:
    if draft.target_layers is not None:
        yield finding(
            "layers of the target",
            draft.target_layers == spec.num_layers,
            str(spec.num_layers),
            f"num_target_layers = {draft.target_layers}",
            "the ids were chosen for another target",
        )
