"""Around ``ModelRunner.forward``: taps in the decoder layers and the final norm, for a marked forward only.

SGLang's decoder layers take one or both of two keywords (:mod:`.families`): an object whose ``capture`` they call, or a
function, with the residual stream entering the layer, after whatever all-reduce or finalize was still owed to it. That
is hidden-state index ``i`` at layer ``i``. For a forward with a plan a pre-hook puts a :class:`Tap` there (in front of
the server's own, if it has one); the final norm's outputs are the last hidden state after and before the norm. All
hooks are gone when the forward ends, so a forward without a plan runs exactly as it would without us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_capture.spec import LAST_HIDDEN_KEYS
from sglang_capture_patches.batch_plan import Plan, plan_of
from sglang_capture_patches.families import PRODUCED

logger = logging.getLogger(__name__)


class Tap:
    """Stands in for SGLang's accumulator of auxiliary hidden states: takes our rows, then passes on to the server's."""

    copies_on_append = True

    def __init__(self, take: Callable[[torch.Tensor], None], own: Any):
        self._take = take
        self._own = own

    def capture(self, hidden: torch.Tensor, *, owned: bool = False) -> None:
        self._take(hidden)
        if self._own is not None:
            self._own.capture(hidden, owned=owned)

    def append(self, hidden: torch.Tensor) -> None:
        self._take(hidden)
        if self._own is not None:
            self._own.append(hidden)

    def __len__(self) -> int:
        return 0 if self._own is None else len(self._own)


def around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's forward, with taps if the batch has a plan. Only SGLang's own exceptions pass through."""
    plan = plan_of(forward_batch)
    if plan is None:
        return original(runner, forward_batch, *args, **kwargs)
    try:
        with _taps(plan):
            result = original(runner, forward_batch, *args, **kwargs)
    except BaseException as error:
        reason = f"the engine's forward failed: {error}"
        _guarded(plan, lambda: plan.fail(reason))
        raise
    _guarded(plan, plan.commit)
    return result


@contextmanager
def _taps(plan: Plan) -> Iterator[None]:
    handles: list[Any] = []
    try:
        _guarded(plan, lambda: _attach(plan, handles))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attach(plan: Plan, handles: list[Any]) -> None:
    target = plan.runtime.target
    keys = plan.keys
    for index in sorted(key for key in keys if isinstance(key, int)):
        handles.append(target.layers[index].register_forward_pre_hook(_layer_hook(plan, index), with_kwargs=True))
    if any(isinstance(key, str) for key in keys):
        handles.append(target.norm.register_forward_hook(_norm_hook(plan)))


def _layer_hook(plan: Plan, index: int) -> Callable[..., Any]:
    def hook(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def take(hidden: torch.Tensor) -> None:
            _guarded(plan, lambda: plan.take(index, hidden))

        own = kwargs.get(keyword)
        return args, {**kwargs, keyword: _tapped(take, own) if keyword == PRODUCED else Tap(take, own)}

    keyword = plan.runtime.target.keyword
    return hook


def _tapped(take: Callable[[torch.Tensor], None], own: Callable[..., None] | None) -> Callable[..., None]:
    """The same as a :class:`Tap`, where SGLang takes a function."""

    def capture(hidden: torch.Tensor, *, owned: bool = False) -> None:
        take(hidden)
        if own is not None:
            own(hidden, owned=owned)

    return capture


def _norm_hook(plan: Plan) -> Callable[..., None]:
    """SGLang's norm returns ``(normed, residual)`` when it is given a residual to add, else the normed tensor alone."""

    def hook(_norm: Any, args: tuple[Any, ...], output: Any) -> None:
        normed, residual = output if isinstance(output, tuple) else (output, args[0])

        def take() -> None:
            plan.take(LAST_HIDDEN_KEYS["post"], normed)
            plan.take(LAST_HIDDEN_KEYS["pre"], residual)

        _guarded(plan, take)

    return hook


def _guarded(plan: Plan, action: Callable[[], None]) -> None:
    """Whatever goes wrong in capturing ends the captures of this forward, never the forward."""
    try:
        action()
    except Exception as error:
        logger.exception("sglang-capture: a capture failed; the server goes on")
        plan.fail(f"{type(error).__name__}: {error}")
