"""Samples on their way into a format: cut, converted, judged, and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_capture.dump import Dump
from sglang_capture.export.base import UnfitSampleError
from sglang_capture.shards import CaptureDataset
from sglang_capture.spec import CaptureSpec, LastHidden


def cut(sample: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """The first ``length`` tokens of a :class:`CaptureDataset` sample; all of them if there are no more."""
    if length is None or len(sample["input_ids"]) <= length:
        return dict(sample)
    return {
        name: value[:length].clone() if isinstance(value, torch.Tensor) else value for name, value in sample.items()
    }


def check_finite(name: str, rows: torch.Tensor) -> None:
    """Refuse a sample of whose ``rows``, called ``name``, one holds NaN or Inf.

    Raises:
        UnfitSampleError: with the first such row.
    """
    lowest, highest = torch.aminmax(rows)
    if not (lowest.isfinite() and highest.isfinite()):
        first = int(rows.flatten(1).isfinite().all(dim=1).int().argmin())
        raise UnfitSampleError(f"{name} holds NaN or Inf, first in row {first}")


def as_bfloat16(name: str, rows: torch.Tensor) -> torch.Tensor:
    """``rows`` in bfloat16, all finite, in a storage of their own size (``torch.save`` writes the whole storage).

    Raises:
        UnfitSampleError: a row holds NaN or Inf, by itself or in bfloat16; ``name`` is told with the row.
    """
    converted = rows.to(torch.bfloat16)
    check_finite(name, converted)
    return converted if converted.untyped_storage().nbytes() == converted.nbytes else converted.clone()


def need_adjacent_supervised(mask: torch.Tensor) -> None:
    """Refuse a sample in which no two tokens in a row are supervised, ``mask`` being 1 where they are, ``[T]``.

    Raises:
        UnfitSampleError: there are none.
    """
    supervised = mask.bool()
    if not bool((supervised[:-1] & supervised[1:]).any()):
        raise UnfitSampleError("no two tokens in a row are supervised, and the trainer stops at such a sample")


def dtype_notes(spec: CaptureSpec) -> list[str]:
    """That rows were converted to bfloat16, if they were."""
    if spec.dtype == "bfloat16":
        return []
    return [f"hidden states were converted from {spec.dtype} to bfloat16"]


def mask_notes(dataset: CaptureDataset, rows: Sequence[int], length: int | None) -> list[str]:
    """A mask of all ones is right for plain text and wrong for a conversation: nobody but the user can tell."""
    ones, zeros, shortened = 0, 0, 0
    for row in rows:
        mask = dataset[row]["loss_mask"]
        shortened += length is not None and len(mask) > length
        ones += bool(mask[:length].all())
        zeros += not bool(mask[:length].any())
    notes = []
    if shortened:
        notes.append(f"{shortened} of {len(rows)} samples were cut to their first {length} tokens")
    if ones:
        notes.append(
            f"{ones} of {len(rows)} samples have a loss mask of all ones, so every token of them is trained: as is "
            "usual for prompts, input_ids without a mask, and requests that were marked by hand (--ids chooses samples)"
        )
    if zeros:
        notes.append(f"{zeros} of {len(rows)} samples have a loss mask of all zeros: nothing of them is trained")
    return notes


def dump_of(
    sample_id: str,
    spec: CaptureSpec,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor | None,
    last_hidden: Mapping[str, torch.Tensor],
    *,
    dtype: str = "bfloat16",
) -> Dump:
    """A sample as an export holds it, for ``verify``.

    Args:
        spec: the dataset's.
        input_ids: ``[T]``.
        hidden_states: ``[T, L * H]`` or ``[T, L, H]`` in the order of ``spec.layers``; ``None`` if the format has none.
        last_hidden: by the names that dumps use, ``[T, H]`` each.
        dtype: of the rows in the files.

    Raises:
        ValueError: a tensor has other rows than there are tokens, or another width.
    """
    tokens, hidden = len(input_ids), spec.hidden_size
    # Copied, not validated: a spec of its own must name a layer, and EAGLE-1 files hold none.
    layers = spec.layers if hidden_states is not None else ()
    kinds: dict[frozenset[str], LastHidden] = {
        frozenset(): "none",
        frozenset({"last_hidden_state"}): "post",
        frozenset({"last_hidden_state_prenorm"}): "pre",
        frozenset({"last_hidden_state", "last_hidden_state_prenorm"}): "both",
    }
    states = torch.empty(tokens, 0, hidden) if hidden_states is None else hidden_states
    expected = {"hidden states": (states, len(layers) * hidden), **{k: (v, hidden) for k, v in last_hidden.items()}}
    for name, (rows, width) in expected.items():
        found = (len(rows), rows[0].numel() if len(rows) else 0)
        if found != (tokens, width):
            raise ValueError(f"{name} has {found[0]} rows of {found[1]} numbers, expected {tokens} of {width}")
    return Dump(
        capture_id=sample_id,
        request_id="",
        spec=spec.model_copy(update={"dtype": dtype, "layers": layers, "last_hidden": kinds[frozenset(last_hidden)]}),
        input_ids=input_ids,
        hidden_states=states.reshape(tokens, len(layers), hidden),
        last_hidden=dict(last_hidden),
    )
