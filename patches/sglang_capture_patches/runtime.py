"""The plugin's state in one scheduler process: the target model, the settings, and the recorder of a writing rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from sglang_capture.capture import CaptureRequest
from sglang_capture.recorder import Recorder
from sglang_capture.spec import CaptureSpec
from sglang_capture.spool import Counts
from sglang_capture_patches.marked import Decision, Marked, Refused, decide, ended, vocabulary_ids, watch
from sglang_capture_patches.target import Target

logger = logging.getLogger(__name__)


@dataclass
class Runtime:
    """What one rank captures with.

    Attributes:
        model_runner: the target's ``ModelRunner``; a draft has its own, and is never captured.
        spec: what a mark without own wishes gets.
        every: ``SGLANG_CAPTURE_MODE=all``.
        recorder: only on the ranks that write.
    """

    model_runner: Any
    target: Target
    spec: CaptureSpec
    every: bool
    token: str | None
    recorder: Recorder | None
    counts: Counts = field(default_factory=Counts)

    def may_be_marked(self, req: Any) -> bool:
        """A cheap look, before anything is decided."""
        return self.every or req.sampling_params.custom_params is not None

    def decide(self, req: Any) -> Decision:
        return decide(req, self.spec, every=self.every, token=self.token)

    def admit(self, req: Any) -> Marked | None:
        """The marked request, its capture begun; ``None`` if there is nothing to capture. Never raises: one request's
        fault is not its batch-mates'."""
        try:
            decision = self.decide(req)
            if isinstance(decision, Refused):
                self._tell(decision)
                return None
            if decision is None or not self._begun(req, decision):
                return None
            return decision
        except Exception as error:
            logger.exception("sglang-capture: request %s is not captured", getattr(req, "rid", "?"))
            if self.recorder is not None:
                self.recorder.last_error = f"{type(error).__name__}: {error}"
            return None

    def _begun(self, req: Any, marked: Marked) -> bool:
        over = ended(req)
        if over is not None:
            # An aborted request still runs one forward, over a prompt of one made-up token.
            if self.recorder is not None:
                if marked.capture is not None:
                    self.recorder.fail(marked.capture, over)
                else:
                    self.recorder.refuse(marked.capture_id, marked.request_id, over)
            return False
        if self.recorder is not None and marked.capture is None:
            request = CaptureRequest(marked.capture_id, marked.request_id, marked.spec, vocabulary_ids(req), watch(req))
            marked.capture = self.recorder.begin(request)
        return True

    def _tell(self, refused: Refused) -> None:
        if not refused.told and self.recorder is not None:
            refused.told = True
            self.recorder.counts.marked += 1
            self.recorder.refuse(refused.capture_id, refused.request_id, refused.reason)


_current: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make ``runtime`` the one of this process."""
    global _current
    _current = runtime


def of(model_runner: Any) -> Runtime | None:
    """The runtime, if ``model_runner`` is the target that it captures from."""
    return _current if _current is not None and _current.model_runner is model_runner else None


def is_captured(req: Any) -> bool:
    """Whether a request's prompt is to be captured. Never raises."""
    if _current is None or not _current.may_be_marked(req):
        return False
    try:
        return isinstance(_current.decide(req), Marked)
    except Exception:
        logger.exception("sglang-capture: request %s is taken as not marked", getattr(req, "rid", "?"))
        return False
