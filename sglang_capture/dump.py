"""One dump: the hidden states of one marked request as a ``.pt`` file. (Reading side; the writing side follows.)"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_capture.spec import CaptureSpec, SpecError


class DumpError(RuntimeError):
    """A dump that cannot be read: truncated, no dump at all, or not what its spec says."""


@dataclass(frozen=True)
class Dump:
    """A dump as read: T tokens, L layers, hidden size H; the tensors map the file's pages.

    Attributes:
        input_ids: int64 ``[T]``.
        hidden_states: the engine's dtype, ``[T, L, H]``, in the order of ``spec.layers``.
        last_hidden: by key (``last_hidden_state`` after the final norm, ``last_hidden_state_prenorm`` before it),
            ``[T, H]`` each.
    """

    capture_id: str
    request_id: str
    spec: CaptureSpec
    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    last_hidden: dict[str, torch.Tensor]

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])


def load_dump(path: Path) -> Dump:
    """Map a dump and check it against its own spec.

    Raises:
        FileNotFoundError: it is gone (packed or deleted meanwhile).
        DumpError: it is truncated, or its tensors are not what its spec says.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises whatever zipfile, pickle and the C++ reader raise
        raise DumpError(f"{path} is no readable dump: {error}") from error
    return dump_from(content, path)


def dump_from(content: object, source: object) -> Dump:
    """The checked :class:`Dump` of a loaded dictionary; ``source`` is named in errors.

    Raises:
        DumpError: a key is missing, or a tensor is not what the spec says.
    """
    if not isinstance(content, dict):
        raise DumpError(f"{source} holds a {type(content).__name__}, and a dump is a dictionary")
    try:
        spec = CaptureSpec.from_json(content["spec"])
        dump = Dump(
            capture_id=content["capture_id"],
            request_id=content["request_id"],
            spec=spec,
            input_ids=content["input_ids"],
            hidden_states=content["hidden_states"],
            last_hidden={key: content[key] for key in spec.last_hidden_keys},
        )
    except (KeyError, SpecError) as error:
        raise DumpError(f"{source} is not a dump of this format: {error}") from error
    for name, tensor, shape, dtype in expected_tensors(dump.tokens, spec, dump):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise DumpError(f"{source}: {name} is {tensor.dtype} {list(tensor.shape)}, its spec says {dtype} {shape}")
    return dump


def expected_tensors(
    tokens: int, spec: CaptureSpec, dump: Dump
) -> list[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype]]:
    """Each tensor of a dump with the shape and dtype that ``spec`` gives it."""
    hidden, dtype = spec.hidden_size, spec.torch_dtype
    return [
        ("input_ids", dump.input_ids, (tokens,), torch.int64),
        ("hidden_states", dump.hidden_states, (tokens, len(spec.layers), hidden), dtype),
        *((key, tensor, (tokens, hidden), dtype) for key, tensor in dump.last_hidden.items()),
    ]
