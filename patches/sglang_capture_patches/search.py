"""Finding what to tap inside a model of SGLang: by what its decoder layers can do, not by its name.

The model to tap is the submodule with decoder layers that take one of the capture keywords
(:mod:`.families`), and with a final norm beside them. Wrappers hold it somewhere below; towers for images and sound,
which may be built from the same layers, are passed by.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sglang_capture_patches.families import KEYWORDS, Family, State, family_of

_TOWERS = re.compile(r"vision|visual|image|audio|speech|tower|encoder")


class UnknownModelError(RuntimeError):
    """There is nothing in this model that could be captured from; the message says why."""


@dataclass(frozen=True)
class Inner:
    """The part of a model that is tapped.

    Attributes:
        layers: one for each decoder layer; those of other pipeline stages are empty stand-ins.
        held: the indices of the layers that are real.
        norm: the final norm.
        keyword: the capture keyword that all of its layers take.
        state: whether this very model was proved right, or is only expected to be.
    """

    layers: nn.ModuleList
    held: range
    norm: nn.Module
    keyword: str
    state: State


def find_inner(model: nn.Module) -> Inner:
    """The model inside ``model`` that can be tapped.

    Raises:
        UnknownModelError: there is none, there are several, or the family is refused.
    """
    found = {name: module for name, module in model.named_modules() if _has_layers(module) and not _TOWERS.search(name)}
    capable = {name: module for name, module in found.items() if _keywords(module)}
    if len(capable) > 1:
        raise UnknownModelError(f"it holds several models that could be meant: {', '.join(capable)}")
    if not capable:
        raise UnknownModelError(_why_none([type(module) for module in found.values()]))
    (holder,) = capable.values()
    return _inner(holder, type(model).__name__)


def _inner(holder: Any, model: str) -> Inner:
    family, exact = family_of(type(holder))
    if family is not None and family.refused:
        raise UnknownModelError(f"{family.models} cannot be captured from: {family.refused}")
    norm = getattr(holder, _norm_name(family), None)
    if norm is None:
        raise UnknownModelError(f"{type(holder).__name__} has no final norm called {_norm_name(family)}")
    common = [keyword for keyword, users in _keywords(holder).items() if users == len(_real(holder.layers))]
    if not common:
        raise UnknownModelError(f"only some layers of {type(holder).__name__} take a capture keyword")
    state: State = family.state(model) if family is not None and exact else "expected"
    held = [index for index, layer in enumerate(holder.layers) if not isinstance(layer, nn.Identity)]
    return Inner(holder.layers, range(held[0], held[-1] + 1), norm, common[0], state)


def _norm_name(family: Family | None) -> str:
    return family.norm if family is not None else "norm"


def _has_layers(module: Any) -> bool:
    layers = getattr(module, "layers", None)
    return isinstance(layers, nn.ModuleList) and bool(_real(layers))


def _real(layers: nn.ModuleList) -> list[nn.Module]:
    """Without the stand-ins for layers of other pipeline stages: SGLang's ``PPMissingLayer`` is an ``Identity``."""
    return [layer for layer in layers if not isinstance(layer, nn.Identity)]


def _keywords(holder: Any) -> dict[str, int]:
    """How many of the layers take each keyword, where any does."""
    forwards = [type(layer).forward for layer in _real(holder.layers)]
    counts = {keyword: sum(_takes(forward, keyword) for forward in forwards) for keyword in KEYWORDS}
    return {keyword: count for keyword, count in counts.items() if count}


def _takes(forward: Callable[..., object], keyword: str) -> bool:
    """Whether it is a parameter, or is looked up in ``**kwargs`` (as the linear layers of Qwen3.5 do)."""
    parameters = inspect.signature(forward).parameters
    if keyword in parameters:
        return True
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return open_ended and keyword in _constants(inspect.unwrap(forward))


def _constants(forward: Callable[..., object]) -> tuple[object, ...]:
    code = getattr(forward, "__code__", None)
    return code.co_consts if code is not None else ()


def _why_none(holders: list[type]) -> str:
    """What to say of a model whose layers take no keyword: perhaps those of a later SGLang do."""
    for holder in holders:
        family, exact = family_of(holder)
        if family is not None and exact:
            return f"{family.models}: captured from SGLang {family.since} on"
    names = ", ".join(holder.__name__ for holder in holders) or "found none"
    return f"no decoder layers in it take one of SGLang's capture keywords, {' or '.join(KEYWORDS)} ({names})"
