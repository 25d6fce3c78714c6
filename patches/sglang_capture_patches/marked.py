"""What is to be captured of one SGLang request: decided once, alike on every rank of a group.

All ranks of an attention-TP group must hook the same layers in the same forward (the gather inside is collective), so a
decision may depend on the request and on the server's settings alone, never on the spool's state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_capture.capture import Capture
from sglang_capture.layers import LayerError, check_layers
from sglang_capture.mark import Mark, MarkError, parse_mark, refused_id, safe_id, shortened
from sglang_capture.spec import CaptureSpec

_ATTRIBUTE = "_sglang_capture"
_PARAMS = "_sglang_capture_params"
_QUEUED = "_sglang_capture_queued"

MOST_REQUEST_ID = 256
"""Characters of a request's id that are kept; SGLang takes any number, and a dump's quota has no room for them."""

HEALTH_CHECK_PREFIX = "HEALTH_CHECK"
"""SGLang's own requests begin with this (``constants.HEALTH_CHECK_RID_PREFIX``)."""


@dataclass(eq=False)
class Marked:
    """A request that is captured.

    Attributes:
        keys: the hidden-state indices and the keys of the last hidden states that this rank hands over.
        computed: whether a forward has computed rows of it; alike on all ranks.
        capture: the capture, once begun; always ``None`` on ranks that do not write.
    """

    capture_id: str
    request_id: str
    spec: CaptureSpec
    keys: frozenset[int | str]
    computed: bool = False
    capture: Capture | None = None


@dataclass(eq=False)
class Refused:
    """A marked request that is not captured, and why; ``told`` once that was recorded."""

    capture_id: str
    request_id: str
    reason: str
    told: bool = False


Decision = Marked | Refused | None


@dataclass(frozen=True)
class Rules:
    """What decisions depend on beside the request: alike on every rank, but for ``keys``.

    Attributes:
        spec: the server's default spec, which the mark may override.
        keys: what this rank's layers can hand over.
        every: ``SGLANG_CAPTURE_MODE=all``.
    """

    spec: CaptureSpec
    keys: frozenset[int | str]
    every: bool
    token: str | None


def decide(req: Any, rules: Rules) -> Decision:
    """What is to be done with SGLang's ``Req``; ``None`` if it is not marked. Computed once, then kept on it."""
    custom = custom_params(req)
    if custom is None and not rules.every:
        return None
    kept: Decision = getattr(req, _ATTRIBUTE, None)
    if kept is None:
        kept = _decide(req, custom, rules)
        if kept is not None:
            setattr(req, _ATTRIBUTE, kept)
    return kept


def _decide(req: Any, custom: object, rules: Rules) -> Decision:
    rid = str(req.rid)
    kept_rid = shortened(rid, MOST_REQUEST_ID)
    try:
        mark = parse_mark(custom, token=rules.token)
        if mark is None:
            if not rules.every or not _of_a_client(req):
                return None
            mark = Mark()
        asked = _spec_for(mark, rules.spec)
        _check_request(req, rules.spec.vocab_size)
    except (MarkError, LayerError) as error:
        return Refused(refused_id(custom, rid), kept_rid, str(error))
    keys: frozenset[int | str] = frozenset([*asked.layers, *asked.last_hidden_keys])
    return Marked(mark.capture_id or safe_id(rid), kept_rid, asked, keys & rules.keys)


def refuse(req: Any, marked: Marked, reason: str) -> Refused:
    """Take back the decision that a request is captured, for as long as it lives."""
    refused = Refused(marked.capture_id, marked.request_id, reason)
    setattr(req, _ATTRIBUTE, refused)
    return refused


def custom_params(req: Any) -> object:
    """What the client sent as ``custom_params``; ``None`` if nothing."""
    kept = getattr(req, _PARAMS, None)
    return req.sampling_params.custom_params if kept is None else kept


def keep_params(req: Any, custom: object) -> None:
    """Remember what the client sent: SGLang is about to forget it."""
    setattr(req, _PARAMS, custom)


def entered_queue(req: Any) -> None:
    """What SGLang makes for itself, to measure how fast it is, never enters the queue."""
    setattr(req, _QUEUED, True)


def _of_a_client(req: Any) -> bool:
    return getattr(req, _QUEUED, False) and not str(req.rid).startswith(HEALTH_CHECK_PREFIX)


def _spec_for(mark: Mark, spec: CaptureSpec) -> CaptureSpec:
    layers = spec.layers if mark.layers is None else mark.layers
    check_layers(layers, spec.num_layers)
    return spec.model_copy(update={"layers": layers, "last_hidden": mark.last_hidden or spec.last_hidden})


def _check_request(req: Any, vocab_size: int) -> None:
    """Refuse what would give rows that are not this model's rows of these ids."""
    if req.session is not None:
        raise MarkError("requests of a session cannot be captured: their history is not computed again")
    if req.lora_id is not None:
        raise MarkError("requests with a LoRA adapter cannot be captured: the rows would not be the base model's")
    if req.input_embeds is not None:
        raise MarkError("requests with input_embeds cannot be captured: their rows belong to no token ids")
    if getattr(req, "positional_embed_overrides", None) is not None:
        raise MarkError("requests with embedding overrides cannot be captured: some rows belong to no token ids")
    if getattr(req, "multi_item_delimiter_indices", None) is not None:
        raise MarkError("several items scored in one prompt cannot be captured: their rows do not see each other")
    ids = _vocabulary_ids(req)
    if len(ids) != len(req.origin_input_ids):
        raise MarkError("this model's image tokens are expanded inside the engine: no vocabulary id for each row")
    lowest, highest = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if lowest < 0 or highest >= vocab_size:
        # Embeddings are padded, so the engine serves it; the rows belong to no token.
        wrong = lowest if lowest < 0 else highest
        raise MarkError(f"every row must have a vocabulary id, from 0 to {vocab_size - 1}; found {wrong}")


def vocabulary_ids(req: Any) -> torch.Tensor:
    """int64 ``[T]``: the vocabulary id of each row of the prompt.

    At image positions ``origin_input_ids`` holds the engine's internal hashes; the ids before that replacement have the
    model's placeholder there.
    """
    return torch.from_numpy(_vocabulary_ids(req).copy())


def _vocabulary_ids(req: Any) -> NDArray[np.int64]:
    """A view where SGLang keeps ids in an array, as its later releases do: on the engine's thread each pass counts."""
    ids = req.origin_input_ids if req.multimodal_inputs is None else req.origin_input_ids_unpadded
    return np.asarray(ids, dtype=np.int64)


def watch(req: Any) -> Callable[[], str | None]:
    """A function that says why the engine let go of ``req``, or ``None`` while it may still run."""
    reference = weakref.ref(req)

    def gone() -> str | None:
        alive = reference()
        if alive is None:
            return "the engine dropped the request before its prompt was complete"
        return ended(alive)

    return gone


def answered(req: Any) -> bool:
    """Whether its prompt was computed to the end: there is a token of the answer. After a retraction it may come again,
    and need not be captured, nor kept from the cache, a second time. Alike on all ranks."""
    return len(req.output_ids) > 0


def ended(req: Any) -> str | None:
    """Why a request is over, or is about to be; ``None`` while it runs."""
    reason = req.finished_reason or req.to_finish
    if reason is None:
        return None
    detail = getattr(reason, "message", None) or type(reason).__name__
    return f"the engine ended the request: {detail}"
