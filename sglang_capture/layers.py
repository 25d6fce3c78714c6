"""Hidden-state indices: the one place that translates between conventions.

Inside the project a layer is always named by its *hidden-state index* ``i``, Hugging Face's
``output_hidden_states[i]``: 0 is the token embeddings, ``i`` is the residual stream after ``i`` decoder layers
(= entering the 0-based layer ``i`` = SGLang's ``layers_to_capture`` value). The other common convention,
*output-of-layer* ``k`` (after the 0-based layer ``k``), is index ``k + 1``; it appears only at the edges.

The index ``n`` of an ``n``-layer model is no index here: Hugging Face puts the *final-normed* state there, and that is
what ``last_hidden`` asks for, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

CONVENTION: Final = "hf_hidden_states_index"
"""What a spec writes beside its ``layers``."""


class LayerError(ValueError):
    """A set of layers that the model, or nobody's model, has."""


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The default indices of an ``num_layers``-layer model: ``[3, n//2 + 1, n - 2]``; 61 layers give ``[3, 31, 59]``.

    Below seven layers the formula names an index twice; three to six layers get the three indices below ``n``.

    Raises:
        LayerError: fewer than three layers hold no three different indices.
    """
    if num_layers >= 7:
        return (3, num_layers // 2 + 1, num_layers - 2)
    if num_layers >= 3:
        return (num_layers - 3, num_layers - 2, num_layers - 1)
    raise LayerError(
        f"a model of {num_layers} layers has no default layers (three different indices are needed); "
        "name them with SGLANG_CAPTURE_LAYERS"
    )


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """The indices most published EAGLE-3 drafts use: ``[2, n//2, n - 3]`` (61 layers: ``[2, 30, 58]``).

    Source: ``set_eagle3_layers_to_capture(None)`` in SGLang's ``models/deepseek_v2.py``.
    """
    return (2, num_layers // 2, num_layers - 3)


def parse_layers(text: str) -> tuple[int, ...]:
    """Read ``"3,31,59"`` into ascending indices.

    Raises:
        LayerError: an entry is no whole number, an index is negative or named twice, or there is none.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    try:
        numbers = [int(entry) for entry in entries]
    except ValueError:
        raise LayerError(f"layers must be comma-separated hidden-state indices like 3,31,59; found {text!r}") from None
    return canonical_layers(numbers)


def canonical_layers(layers: Iterable[object]) -> tuple[int, ...]:
    """Ascending indices from a list that a client or a file gave.

    Raises:
        LayerError: the list is empty, holds something else than whole numbers ≥ 0, or names an index twice.
    """
    found = list(layers)
    if not found:
        raise LayerError("at least one hidden-state index is needed; found an empty list")
    numbers: list[int] = []
    for entry in found:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise LayerError(f"layers must be whole numbers (hidden-state indices); found {entry!r}")
        if entry < 0:
            raise LayerError(f"hidden-state indices start at 0 (the token embeddings); found {entry}")
        numbers.append(entry)
    if len(set(numbers)) != len(numbers):
        raise LayerError(f"each hidden-state index may be named once; found {numbers}")
    return tuple(sorted(numbers))


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Check that a model of ``num_layers`` decoder layers has every index.

    Raises:
        LayerError: an index is out of range; index ``num_layers`` gets a hint at ``last_hidden``.
    """
    for index in layers:
        if index == num_layers:
            raise LayerError(
                f"index {index} of a model with {num_layers} layers is the last hidden state: ask for it with "
                f"last_hidden (post, pre or both); layers go from 0 to {num_layers - 1}"
            )
        if index > num_layers:
            raise LayerError(
                f"index {index} does not exist: the model has {num_layers} layers, so indices go from 0 to "
                f"{num_layers - 1}"
            )


def output_of(layers: Iterable[int]) -> tuple[int | None, ...]:
    """The same tensors in the output-of-layer convention; the embeddings (index 0) are no layer's output: ``None``."""
    return tuple(index - 1 if index else None for index in layers)


def from_output_of(outputs: Iterable[int]) -> tuple[int, ...]:
    """Hidden-state indices of output-of-layer numbers: ``[2, 30, 58]`` gives ``(3, 31, 59)``."""
    return canonical_layers(output + 1 for output in outputs)
