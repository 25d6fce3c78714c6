"""How rows get from the engine's tensor into a dump's pages. Pure torch; nothing here knows SGLang.

On the CPU the copy is made at once: rows are copied one time, from the engine's tensor to their place in the file.

On CUDA the engine's stream must not wait for the bus. The rows are cloned on the engine's stream (the engine writes
over its residual in the next kernel), sent to pinned memory on a stream of our own, and put into the file by the
writer's thread when that transfer is done. PyTorch's caching host allocator keeps the pinned blocks for reuse.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from sglang_capture.patience import Patience

PINNED_BYTES = 1 << 30
"""Most pinned memory in flight on CUDA; a copy that would exceed it waits for the writer (back-pressure)."""


class Copier(Protocol):
    """Copies ``source`` into ``destination``, at once or on the writer's thread before anything submitted later."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, patience: Patience) -> None: ...


class DirectCopier:
    """For tensors in host memory: the copy is done when the call returns."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, patience: Patience) -> None:
        destination.copy_(source)


class PinnedCopier:
    """For CUDA tensors: through pinned memory, beside the engine's stream.

    Args:
        submit: hands a function to the writer's thread, in order.
        budget: most bytes of pinned memory in flight.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None], budget: int = PINNED_BYTES):
        self._submit = submit
        self._budget = budget
        self._in_flight = 0
        self._room = threading.Condition()
        self._stream: torch.cuda.Stream | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, patience: Patience) -> None:
        """Raises TimeoutError if the writer does not keep up: the capture fails, and the engine goes on."""
        size = source.numel() * source.element_size()
        self._take(size, patience)
        try:
            pinned, done = self._send(source)
        except BaseException:
            self._give(size)
            raise

        def land() -> None:
            try:
                done.synchronize()
                destination.copy_(pinned)
            finally:
                self._give(size)

        self._submit(land)

    def _send(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        stream = self._stream = self._stream or torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        staged = source.clone(memory_format=torch.contiguous_format)
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            pinned.copy_(staged, non_blocking=True)
            done.record(stream)
        # The allocator must not hand the staged block out again before our stream has read it.
        staged.record_stream(stream)
        return pinned, done

    def _take(self, size: int, patience: Patience) -> None:
        """Wait for room; one copy larger than the whole budget goes alone."""
        with self._room:
            with patience.waiting() as seconds:
                free = self._room.wait_for(
                    lambda: self._in_flight == 0 or self._in_flight + size <= self._budget, seconds
                )
            if not free:
                raise TimeoutError("the dump writer does not keep up with the engine")
            self._in_flight += size

    def _give(self, size: int) -> None:
        with self._room:
            self._in_flight -= size
            self._room.notify_all()
