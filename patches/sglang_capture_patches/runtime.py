"""The plugin's state in one scheduler process: the target model, the rules, and what fills the dumps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_capture.capture import CaptureRequest
from sglang_capture.filler import Filler
from sglang_capture.spec import CaptureSpec
from sglang_capture.spool import Counts
from sglang_capture_patches.marked import (
    Decision,
    Marked,
    Refused,
    Rules,
    answered,
    custom_params,
    decide,
    ended,
    entered_queue,
    refuse,
    vocabulary_ids,
    watch,
)
from sglang_capture_patches.target import Target, local_path, short_name

logger = logging.getLogger(__name__)

_APART = "|sglang-capture-weights-"

_STALE_IMAGES = (
    "requests with images or sound cannot be captured after the weights of the running server were changed: SGLang "
    "keeps what the weights before made of them. Restart the server"
)

_IN_SESSION = (
    "the server's weights are being changed: between begin_weight_update and end_weight_update they may be half of one "
    "model and half of another. Send it again after end_weight_update"
)


@dataclass
class Runtime:
    """What one rank captures with.

    Attributes:
        model_runner: the target's ``ModelRunner``; a draft has its own, and is never captured.
        filler: only on the ranks that fill dumps.
        server: one per server start, alike on its ranks, and known to nobody outside.
        waiting: marked requests that no batch held yet, each with the function that tells whether it is gone.
        weight_updates: how often the weights were changed.
        in_session: whether somebody may change them at any time.
    """

    model_runner: Any
    target: Target
    rules: Rules
    filler: Filler | None
    server: str = ""
    counts: Counts = field(default_factory=Counts)
    waiting: dict[Marked, Callable[[], str | None]] = field(default_factory=dict)
    weight_updates: int = 0
    in_session: bool = False

    @property
    def spec(self) -> CaptureSpec:
        """What a mark without own wishes gets."""
        return self.rules.spec

    def may_be_marked(self, req: Any) -> bool:
        """A cheap look, before anything is decided."""
        return self.rules.every or custom_params(req) is not None

    def decide(self, req: Any) -> Decision:
        return decide(req, self.rules)

    def expect(self, req: Any) -> None:
        """A request entered the queue, for the first time or after a retraction."""
        if self.rules.every:
            entered_queue(req)
        if self.filler is not None and self.may_be_marked(req):
            decision = self.decide(req)
            if isinstance(decision, Refused):
                self._tell(decision)  # it may be aborted before a batch holds it
            elif decision is not None and decision.capture is None:
                self.waiting[decision] = watch(req)

    def sweep(self) -> None:
        """Record the waiting requests that the engine dropped; called about once a second, on another thread."""
        for marked, gone in self.waiting.copy().items():
            reason = gone()
            if reason is not None:
                self._left(marked, reason)

    def aborted(self, beginning: str, still_waiting: Iterable[Any]) -> None:
        """Record the waiting requests that an abort took out of the queue; called on the engine's thread."""
        there = {str(req.rid) for req in still_waiting} if self.waiting else set()
        for marked in list(self.waiting):
            if marked.request_id.startswith(beginning) and marked.request_id not in there:
                self._left(marked, "it was aborted while it waited")

    def _left(self, marked: Marked, reason: str) -> None:
        if self.waiting.pop(marked, None) is not None and self.filler is not None:
            self.filler.counts.marked += 1
            self.filler.refuse(marked.capture_id, marked.request_id, f"{reason}; none of it was computed")

    def weights_change(self) -> None:
        """The weights are about to be changed: end what is under way."""
        if self.filler is not None:
            self.filler.fail_all("the server's weights were changed while it was computed")

    def weights_changed(self, checkpoint: str | None, *, whole: bool = True) -> None:
        """End what is under way, and name the weights as nobody else has them.

        Not even by the checkpoint they came from: it may hold some of the tensors only, in a file that no digest looks
        at, or with a config that an update leaves out. ``model_path`` says where it was; both places where an update
        failed, for it may have changed all of the weights even so.
        """
        self.weights_change()
        self.weight_updates += 1
        base = self.spec.weights_digest.partition("+")[0]
        self._name_weights(weights_digest=f"{base}+{short_name(self.server)}.{self.weight_updates}")
        if checkpoint is not None:
            path = local_path(checkpoint)
            self._name_weights(model_path=path if whole else f"{self.spec.model_path} or {path}", revision="")

    def _name_weights(self, **fields: str) -> None:
        self.rules = replace(self.rules, spec=self.spec.model_copy(update=fields))

    def admit(self, req: Any) -> Marked | None:
        """The marked request, its capture begun; ``None`` if there is nothing to capture. Never raises: one request's
        fault is not its batch-mates'."""
        try:
            decision = self.decide(req)
            if isinstance(decision, Refused):
                self._tell(decision)
                return None
            if decision is None or answered(req):
                return None
            stale = self._stale(req)
            if stale and not decision.computed:
                self.waiting.pop(decision, None)
                self._tell(refuse(req, decision, stale))
                return None
            return decision if self._begun(req, decision) else None
        except Exception as error:
            logger.exception("sglang-capture: request %s is not captured", getattr(req, "rid", "?"))
            if self.filler is not None:
                self.filler.last_error = f"{type(error).__name__}: {error}"
            return None

    def _stale(self, req: Any) -> str:
        """Why the rows of a prompt whose turn has come would not be one model's; empty if they would."""
        if self.in_session:
            return _IN_SESSION
        # SGLang keeps what its encoder made of an image, whatever becomes of the weights.
        return _STALE_IMAGES if self.weight_updates and req.multimodal_inputs is not None else ""

    def set_apart(self, req: Any) -> None:
        """Let a captured prompt find nothing in the prefix cache that weights before the present ones have computed.
        What it has computed itself stays where it is."""
        decision = self.decide(req)
        if self.weight_updates and isinstance(decision, Marked) and not decision.computed:
            own = (req.extra_key or "").partition(_APART)[0]
            # No client can guess the server's name: unmarked prompts with this key would fill the same place.
            req.extra_key = f"{own}{_APART}{self.server}-{self.weight_updates}"

    def _begun(self, req: Any, marked: Marked) -> bool:
        marked.computed = True
        self.waiting.pop(marked, None)
        over = ended(req)
        if over is not None:
            # An aborted request still runs one forward, over a prompt of one made-up token.
            if self.filler is not None:
                if marked.capture is not None:
                    self.filler.fail(marked.capture, over)
                else:
                    self.filler.counts.marked += 1
                    self.filler.refuse(marked.capture_id, marked.request_id, over)
            return False
        if self.filler is not None and marked.capture is None:
            # The weights may have been changed since the request was marked.
            weights = {name: getattr(self.spec, name) for name in ("weights_digest", "model_path", "revision")}
            spec = marked.spec.model_copy(update=weights)
            request = CaptureRequest(marked.capture_id, marked.request_id, spec, vocabulary_ids(req), watch(req))
            marked.capture = self.filler.begin(request)
        return True

    def _tell(self, refused: Refused) -> None:
        if not refused.told and self.filler is not None:
            refused.told = True
            self.filler.counts.marked += 1
            self.filler.refuse(refused.capture_id, refused.request_id, refused.reason)


_current: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make ``runtime`` the one of this process."""
    global _current
    _current = runtime


def of(model_runner: Any) -> Runtime | None:
    """The runtime, if ``model_runner`` is the target that it captures from."""
    return _current if _current is not None and _current.model_runner is model_runner else None


def expect(req: Any) -> None:
    """A request entered the queue. Never raises."""
    _guarded(lambda runtime: runtime.expect(req))


def aborted(beginning: str, still_waiting: Iterable[Any]) -> None:
    """The requests whose ids begin so were aborted. Never raises."""
    _guarded(lambda runtime: runtime.aborted(beginning, still_waiting))


def weights_changed(checkpoint: str | None, *, whole: bool = True) -> None:
    """The weights are other ones now, those of ``checkpoint`` if that is known (all of them?). Never raises."""
    _guarded(lambda runtime: runtime.weights_changed(checkpoint, whole=whole))


def weights_change() -> None:
    """The weights are about to be changed. Never raises."""
    _guarded(Runtime.weights_change)


def session_opened() -> None:
    """Until :func:`session_ended` somebody may change the weights at any time. Never raises."""
    if _current is not None:
        _current.in_session = True


def session_ended() -> None:
    """The session that was opened is over; nothing if none was. Never raises."""
    if _current is not None and _current.in_session:
        _current.in_session = False
        weights_changed(None)


def set_apart(req: Any) -> None:
    """A captured request is about to be matched against the prefix cache. Never raises."""
    _guarded(lambda runtime: runtime.set_apart(req))


def _guarded(action: Callable[[Runtime], None]) -> None:
    if _current is None:
        return
    try:
        action(_current)
    except Exception:
        logger.exception("sglang-capture: an error that the server does not see")


def is_captured(req: Any) -> bool:
    """Whether a request's prompt is (still) to be captured. Never raises."""
    if _current is None or not _current.may_be_marked(req):
        return False
    try:
        return not answered(req) and isinstance(_current.decide(req), Marked)
    except Exception:
        logger.exception("sglang-capture: request %s is taken as not marked", getattr(req, "rid", "?"))
        return False
