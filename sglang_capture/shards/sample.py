"""A sample on its way into a dataset, and what it must be to get in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_capture.dump import LABELS, Dump, expected_tensors
from sglang_capture.mark import is_capture_id
from sglang_capture.shards.manifest import DatasetError, SpecMismatch
from sglang_capture.spec import CaptureSpec


class SampleError(DatasetError):
    """One sample that cannot become part of the dataset; the others can."""


@dataclass(frozen=True)
class Sample:
    """A dump on its way into a shard.

    Attributes:
        sample_id: its name in the dataset; the characters of a capture id.
        dump: its tensors, usually mapped (``load_dump``), so that only the written pages are ever read.
        loss_mask: 0 or 1 for each token, any dtype; ``None`` supervises every token.
        metadata: kept in the shard's header as JSON, with the dump's labels (``nonfinite_rows``, ``zero_rows``) if any.
    """

    sample_id: str
    dump: Dump
    loss_mask: torch.Tensor | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> dict[str, Any]:
        """The metadata, and the labels of a dump with rows at fault, whose names no metadata may have."""
        labels = {key: count for key in LABELS if (count := getattr(self.dump, key))}
        return {**{key: value for key, value in self.metadata.items() if key not in LABELS}, **labels}


def check_sample(sample: Sample, spec: CaptureSpec) -> None:
    """Check that ``sample`` may stand in a dataset of ``spec``.

    Raises:
        SpecMismatch: its dump was captured under another spec.
        SampleError: its id, tensors, loss mask or metadata are not as a dataset needs them.
    """
    name, dump = sample.sample_id, sample.dump
    if not is_capture_id(name):
        raise SampleError(
            f"a sample id is 1–128 of A–Z a–z 0–9 . _ - and does not start with a dot; found {name!r:.80}"
        )
    if differences := spec.differences(dump.spec):
        raise SpecMismatch(
            f"sample {name} was captured under another spec than the dataset's ({'; '.join(differences)}): "
            "pack it into a dataset of its own"
        )
    if dump.tokens < 1:
        raise SampleError(f"sample {name} holds no token")
    for key, tensor, shape, dtype in expected_tensors(dump.tokens, spec, dump):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise SampleError(
                f"{key} of sample {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {shape}"
            )
    if (mask := sample.loss_mask) is not None:
        if tuple(mask.shape) != (dump.tokens,):
            raise SampleError(
                f"the loss mask of sample {name} has shape {list(mask.shape)}, and the capture has {dump.tokens} "
                "tokens: one entry for each token is needed"
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise SampleError(f"the loss mask of sample {name} must hold 0 and 1 only")
    try:
        json.dumps(dict(sample.metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"the metadata of sample {name} cannot be written as JSON: {error}") from error
