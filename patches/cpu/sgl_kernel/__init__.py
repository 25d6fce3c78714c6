"""Stands in for ``sgl_kernel``, whose PyPI wheel cannot be imported without ``libcuda.so``.

SGLang imports dozens of its functions by name while its own modules load, also on the CPU. None of them is called on
the path that ``--device cpu --attention-backend torch_native`` takes, so each is a function that says so when it is
called after all. Speculative decoding does call some, and the attention backend ``intel_amx`` two more: those are here,
in torch (:mod:`.speculative`, :mod:`._attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import extend_path
from typing import Any, NoReturn

import torch

# The wheel's own folder, where it is installed, stays on the path of submodules: ``sgl_kernel.scalar_type`` is plain
# Python, and SGLang's quantization tables need its real values.
__path__ = extend_path(__path__, __name__)

from sgl_kernel import _attention, speculative

# SGLang calls these two as operators.
torch.ops.sgl_kernel.decode_attention_cpu = _attention.decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = _attention.extend_attention_cpu


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):  # the import system and `inspect` probe for these
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    written: Callable[..., Any] | None = getattr(speculative, name, None)
    if written is not None:
        return written

    def missing_kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on the CPU test bed of sglang-capture")

    missing_kernel.__name__ = missing_kernel.__qualname__ = name
    return missing_kernel
