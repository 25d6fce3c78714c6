"""A pipeline stage after the first: fills its layers' rows into the dumps that the first stage answers for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sglang_capture.capture import Capture, CaptureRequest
from sglang_capture.dump import DumpFile
from sglang_capture.filler import LAYOUT_SECONDS, Filler
from sglang_capture.stages import Board, board_path


class Follower(Filler):
    """The writing rank of stage ``stage``, 1 or later. It reserves, publishes and records nothing itself.

    Args:
        group: names the data-parallel rank, as its first stage does.
        directory, device, housekeeping: as :class:`~sglang_capture.filler.Filler` takes them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        group: str,
        stage: int,
        device: str,
        housekeeping: Callable[[], None] = lambda: None,
    ):
        self._group = group
        self._stage = stage
        super().__init__(directory, device=device, housekeeping=housekeeping)

    def begin(self, request: CaptureRequest) -> Capture:
        """Whether the first stage makes this dump shows when there are rows: see :mod:`sglang_capture.stages`."""
        capture = Capture(request, board_path(self.directory, self._group, request))
        self._enter(capture)
        return capture

    def refuse(self, capture_id: str, request_id: str, reason: str, *, retriable: bool = False) -> None:
        """The first stage sees the same request, and records it."""

    def _wanted(self, capture: Capture) -> bool:
        if capture.open and capture.board is None:
            capture.board = Board.open(capture.part)
            if capture.board is None:
                self._close(capture, failed=True)
            else:
                self._thread.submit(lambda: self._map(capture))
        return capture.open

    def _map(self, capture: Capture) -> None:
        """On the writer's thread: the file is there when the first stage says so."""
        board, request = capture.board, capture.request
        assert board is not None
        deadline = time.monotonic() + LAYOUT_SECONDS
        try:
            while not board.laid_out and capture.open and time.monotonic() < deadline:
                if board.given_up:  # the first stage has recorded why
                    self._close(capture, failed=True)
                time.sleep(0.001)
            if board.laid_out and capture.open:
                capture.dump = DumpFile.attach(
                    board.part, request.capture_id, request.request_id, request.spec, request.tokens
                )
        except OSError as error:
            self.fail(capture, f"the dump that the first stage laid out cannot be mapped: {error}")
        finally:
            if capture.dump is not None or not capture.open:
                capture.laid_out.set()

    def _complete(self, capture: Capture) -> None:
        capture.dump = None
        if capture.board is not None:
            capture.board.say_done(self._stage)

    def _failed(self, capture: Capture, reason: str) -> None:
        capture.dump = None
        if capture.board is not None:
            capture.board.say_failed(self._stage, f"pipeline stage {self._stage}: {reason}")
