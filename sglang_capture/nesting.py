"""How deeply JSON from clients may be nested: what reads and writes it goes down by recursion, and that has an end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

MOST_LEVELS: Final = 64
"""Most objects and lists inside each other, the outermost one included. Answers and rows wrap them a few times, and
pydantic writes no more than some 250."""


def too_deep(value: object, most: int = MOST_LEVELS) -> bool:
    """Whether ``value``, as read from JSON, has objects and lists inside each other on more than ``most`` levels."""
    level: list[dict[Any, Any] | list[Any]] = _containers([value])
    for _ in range(most):
        level = [inner for outer in level for inner in _containers(_inside(outer))]
    return bool(level)


def cut(value: Any, most: int = MOST_LEVELS) -> Any:
    """``value`` with "…" for every object and list below the level ``most``."""
    if not isinstance(value, (dict, list)):
        return value
    if most == 0:
        return "…"
    if isinstance(value, list):
        return [cut(inner, most - 1) for inner in value]
    return {key: cut(inner, most - 1) for key, inner in value.items()}


def _inside(value: dict[Any, Any] | list[Any]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _containers(values: Iterable[object]) -> list[dict[Any, Any] | list[Any]]:
    return [value for value in values if isinstance(value, (dict, list))]
