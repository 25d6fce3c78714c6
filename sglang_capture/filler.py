"""Filling dumps with rows: what every writing rank does, whoever answers for the dump. Pure torch, no SGLang.

The engine's thread calls :meth:`Filler.begin`, :meth:`Filler.copy` and :meth:`Filler.commit`; a thread of ours does the
rest. The engine's thread waits for ours where rows arrive before their dump is laid out (milliseconds).

Nothing here raises into the engine: whatever goes wrong ends one capture.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_capture.capture import Capture, CaptureRequest
from sglang_capture.copying import Copier, DirectCopier, PinnedCopier
from sglang_capture.dump import DumpFile
from sglang_capture.patience import Patience
from sglang_capture.spool import Counts
from sglang_capture.writer_thread import WriterThread

LAYOUT_SECONDS = 30.0
"""How long the rows of a forward wait for their dumps to be laid out, and for memory, before the captures fail."""


class Filler(ABC):
    """What :class:`~sglang_capture.recorder.Recorder` and :class:`~sglang_capture.follower.Follower` share.

    Args:
        directory: the spool; this process holds the claim on it.
        device: where the engine's tensors are.
        housekeeping: called about once a second on the writer's thread.
    """

    def __init__(self, directory: Path, *, device: str, housekeeping: Callable[[], None] = lambda: None):
        self.directory = directory
        self.counts = Counts()
        self.last_error = ""
        self.given_up = ""
        self._housekeeping = housekeeping
        self._open: set[Capture] = set()
        self._lock = threading.Lock()
        self._patience = Patience(LAYOUT_SECONDS)
        self._thread = WriterThread(self._keep_house, self._poll, self._note)
        self._copier: Copier = PinnedCopier(self._thread.submit) if device.startswith("cuda") else DirectCopier()

    # -- called on the engine's thread ------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward with marked requests begins: it may wait anew."""
        self._patience.renew()

    @abstractmethod
    def begin(self, request: CaptureRequest) -> Capture:
        """Begin a capture. One that is not to be made comes back closed."""

    def copy(self, capture: Capture, key: int | str, rows: torch.Tensor, position: int) -> None:
        """Copy ``rows`` ``[n, H]`` to the prompt positions ``position, position + 1, …`` of one layer or last state.

        Args:
            key: a hidden-state index, or the key of a last hidden state.
        """
        if not self._wanted(capture):
            return
        try:
            with self._patience.waiting() as seconds:
                laid_out = capture.laid_out.wait(seconds)
            if not laid_out:
                raise TimeoutError("its dump was not laid out in time")
            dump = capture.dump
            if dump is None:  # it failed meanwhile, on the writer's thread
                return
            place = _place(dump, key)[position : position + rows.shape[0]]
            if place.shape != rows.shape or place.dtype != rows.dtype:
                raise ValueError(
                    f"rows of {key} are {rows.dtype} {list(rows.shape)}, and {place.dtype} {list(place.shape)} fit"
                )
            self._copier.copy(place, rows, self._patience)
            self.counts.copies += 1
        except Exception as error:
            self.fail(capture, f"its rows could not be copied: {error}")

    def commit(self, capture: Capture, start: int, stop: int) -> None:
        """All that was asked for of the positions ``[start, stop)`` was copied."""
        if not self._wanted(capture):
            return
        capture.coverage.add(start, stop)
        if capture.coverage.reaches(capture.request.tokens) and self._close(capture, failed=False):
            self._thread.submit(lambda: self._complete(capture))

    def fail(self, capture: Capture, reason: str) -> None:
        """End a capture without a dump."""
        if self._close(capture, failed=True):
            self._failed(capture, reason)

    def fail_all(self, reason: str) -> None:
        """End every capture that is not complete."""
        for capture in list(self._open):
            self.fail(capture, reason)

    def give_up(self, reason: str) -> None:
        """End what is under way, and begin nothing more."""
        self.given_up = reason
        self.fail_all(reason)

    @abstractmethod
    def refuse(self, capture_id: str, request_id: str, reason: str, *, retriable: bool = False) -> None:
        """A marked request is not captured."""

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Finish what was submitted, and stop the thread."""
        self._thread.close()

    # -- for those who answer for the dump, and for those who only fill it ------------------------------------

    def _wanted(self, capture: Capture) -> bool:
        """Whether rows of a capture are still to be taken."""
        return capture.open

    @abstractmethod
    def _complete(self, capture: Capture) -> None:
        """On the writer's thread, behind all copies: this rank's rows are all there."""

    @abstractmethod
    def _failed(self, capture: Capture, reason: str) -> None:
        """On any thread, once for a capture."""

    def _poll(self) -> bool:
        """Look what other processes did; true while something is waited for."""
        return False

    def _enter(self, capture: Capture) -> None:
        with self._lock:
            self._open.add(capture)

    def _close(self, capture: Capture, *, failed: bool) -> bool:
        """Whether this call is the one that ends the capture."""
        with self._lock:
            if not capture.open:
                return False
            capture.open = False
            capture.failed = failed
            self._open.discard(capture)
            return True

    def _note(self, error: Exception) -> None:
        self.last_error = f"{type(error).__name__}: {error}"

    def _keep_house(self) -> None:
        for capture in list(self._open):
            reason = capture.request.gone()
            if reason is not None:
                missing = capture.coverage.missing(capture.request.tokens)
                self.fail(capture, f"{reason}; rows {missing} of {capture.request.tokens} are missing")
        self._housekeeping()


def _place(dump: DumpFile, key: int | str) -> torch.Tensor:
    """Where the rows of ``key`` go: a view ``[T, H]``."""
    if isinstance(key, str):
        return dump.last_hidden[key]
    return dump.hidden_states[:, dump.spec.layers.index(key)]
