"""The tokenizer of the server's model, for one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from sglang_capture.errors import CaptureError
from sglang_capture.prompts import ChatTokenizer
from sglang_capture.service.monitor import SpoolMonitor
from sglang_capture.service.settings import ServiceSettings

Result = TypeVar("Result")


class Tokenizers:
    """Lends out the one tokenizer there is, which changes with the server's model."""

    def __init__(self, settings: ServiceSettings, monitor: SpoolMonitor):
        self._settings = settings
        self._monitor = monitor
        self._lock = threading.Lock()
        self._tokenizer: ChatTokenizer | None = None

    def with_tokenizer(self, work: Callable[[ChatTokenizer], Result]) -> Result:
        """What ``work`` makes of the tokenizer; blocks while another thread has it.

        Raises:
            CaptureError: no server has named one yet, or it cannot be loaded.
        """
        with self._lock:
            return work(self._current())

    async def apart(self, work: Callable[[ChatTokenizer], Result]) -> Result:
        """The same on a worker thread."""
        return await run_in_threadpool(self.with_tokenizer, work)

    def _current(self) -> ChatTokenizer:
        status = self._monitor.status
        path = self._settings.tokenizer or (status and (status.tokenizer_path or status.model_path))
        if not path:
            raise CaptureError(
                "messages need the model's tokenizer, and no server has named one yet: start SGLang with the plugin, "
                "or set SGLANG_CAPTURE_TOKENIZER"
            )
        if self._tokenizer is None or self._tokenizer.path != path:
            self._tokenizer = ChatTokenizer(path, trust_remote_code=self._settings.trust_remote_code)
        return self._tokenizer
