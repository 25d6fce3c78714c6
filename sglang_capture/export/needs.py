"""What trainers need of captures, and the refusals where it is not there."""

from __future__ import annotations

from typing import Final

from sglang_capture.export.base import ExportError, ExportUsageError
from sglang_capture.export.final_norm import FinalNorm
from sglang_capture.export.options import ExportOptions
from sglang_capture.spec import LAST_HIDDEN_KEYS, CaptureSpec

POST: Final = LAST_HIDDEN_KEYS["post"]
PRE: Final = LAST_HIDDEN_KEYS["pre"]


def need_three_layers(trainer: str, spec: CaptureSpec) -> None:
    """Refuse what is not three outputs of layers."""
    layers = list(spec.layers)
    if len(layers) != 3:
        raise ExportError(
            f"{trainer} takes exactly 3 layers; found {len(layers)} ({layers}): capture again "
            "with three, for example the default ones (SGLANG_CAPTURE_LAYERS unset)"
        )
    need_outputs_of_layers(trainer, spec)


def need_outputs_of_layers(trainer: str, spec: CaptureSpec) -> None:
    """Refuse the embeddings among the layers."""
    if 0 in spec.layers:
        raise ExportError(
            f"{trainer} takes outputs of layers, and index 0 of {list(spec.layers)} is the token embeddings, which "
            "no server can feed a draft: capture again with indices from 1 up"
        )


def need_post(trainer: str, spec: CaptureSpec, options: ExportOptions) -> None:
    """Refuse captures that neither hold the last hidden state after the final norm nor let it be computed."""
    if final_norm_for_post(spec, options) is None and POST not in spec.last_hidden_keys:
        remedy = "capture again with SGLANG_CAPTURE_LAST_HIDDEN=post"
        if PRE in spec.last_hidden_keys:
            remedy += ", or name the target's directory with --model, so that its own final norm can be applied"
        raise ExportError(
            f"{trainer} needs the last hidden state after the final norm (post), and applies no norm itself; "
            f"found last_hidden = {spec.last_hidden}: {remedy}"
        )


def need_draft_vocabulary(spec: CaptureSpec, options: ExportOptions) -> None:
    """Refuse a draft vocabulary that is larger than the target's, before anything is written."""
    if options.draft_vocab_size is not None and options.draft_vocab_size > spec.vocab_size:
        raise ExportUsageError(
            f"a draft vocabulary has at most the {spec.vocab_size} tokens of the target's; found "
            f"{options.draft_vocab_size}: give another --draft-vocab-size"
        )


def final_norm_for_post(spec: CaptureSpec, options: ExportOptions) -> FinalNorm | None:
    """The norm that makes the state after it, where the captures hold only the one before it and a model is named.

    Raises:
        ExportError: see :meth:`FinalNorm.load`.
    """
    if POST in spec.last_hidden_keys or PRE not in spec.last_hidden_keys or options.model is None:
        return None
    return FinalNorm.load(options.model, spec)
