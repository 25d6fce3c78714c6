"""One capture inside the server: what was asked for, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_capture.coverage import Coverage
from sglang_capture.dump import DumpFile
from sglang_capture.mapped_file import MappedFile
from sglang_capture.spec import CaptureSpec

if TYPE_CHECKING:
    from sglang_capture.stages import Board


@dataclass(frozen=True)
class CaptureRequest:
    """One marked request, as the engine sees it.

    Attributes:
        input_ids: int64 ``[T]``, the vocabulary id of each row.
        gone: why the engine let go of the request, or ``None`` while it may still run; asked once a second.
    """

    capture_id: str
    request_id: str
    spec: CaptureSpec
    input_ids: torch.Tensor
    gone: Callable[[], str | None]

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(eq=False)
class Capture:
    """A capture that was begun; ``open`` until it is complete, failed or refused. ``board``: with pipeline stages.

    Attributes:
        failed: whether nobody wants its rows any more, on any pipeline stage.
        part: the unfinished dump; on a later pipeline stage the board, which says where that is.
        file: what it is to be laid out in, where that has pages already.
    """

    request: CaptureRequest
    part: Path
    open: bool = True
    failed: bool = False
    file: MappedFile | None = None
    dump: DumpFile | None = None
    board: Board | None = None
    coverage: Coverage = field(default_factory=Coverage)
    laid_out: threading.Event = field(default_factory=threading.Event)
