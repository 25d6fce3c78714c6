"""Who may ask: the API key, and on loopback the name by which the service is called.

A service on loopback may read and write any file its user may (job paths, export folders). A web page that the user
looks at cannot send it JSON, but one whose host name was made to point at 127.0.0.1 could: hence the look at ``Host``.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_capture.service.problems import ProblemError
from sglang_capture.service.settings import ServiceSettings

OPEN_PATHS = frozenset({"/health"})
"""What answers without the key."""

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """ASGI middleware in front of everything, unknown routes and the documentation too."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings):
        self._app = app
        self._key = settings.api_key.get_secret_value().encode() if settings.api_key else None
        self._names = _LOOPBACK_NAMES | {settings.host} if settings.on_loopback else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (problem.response() if problem else self._app)(scope, receive, send)

    def _problem(self, path: str, headers: Headers) -> ProblemError | None:
        host = headers.get("host", "").rpartition(":")
        name = host[0] if host[2].isdigit() else "".join(host)
        if self._names is not None and name and name not in self._names:
            return ProblemError(
                "host-not-allowed",
                f"this service is for this machine only and is called 127.0.0.1 or localhost; found {name!r:.80}. "
                "To be reached by another name, listen on another address (SGLANG_CAPTURE_HOST) with an API key",
            )
        if self._key is None or path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
            return ProblemError(
                "unauthorized", "send the service's SGLANG_CAPTURE_API_KEY as `Authorization: Bearer KEY`"
            )
        return None
