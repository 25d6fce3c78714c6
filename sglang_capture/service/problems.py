"""Errors as RFC 9457 problem documents: one table of kinds, one exception, and the handlers that write them.

Every answer that is not good has the media type ``application/problem+json`` and ``type``, ``title``, ``status`` and
``detail``; some have members of their own (``errors``, ``differences``). ``type`` is
``urn:sglang-capture:problem:KIND``, and docs/http-api.md explains each kind.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sglang_capture.errors import CaptureError

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:sglang-capture:problem:"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """A kind of problem: its HTTP status, what it is called, and whether the same request may succeed later."""

    status: int
    title: str
    retriable: bool = False


KINDS: Final[dict[str, Kind]] = {
    "unauthorized": Kind(401, "The API key is missing or wrong"),
    "host-not-allowed": Kind(403, "The request names another host than this machine"),
    "path-not-allowed": Kind(403, "This path may not be used by clients of this service"),
    "not-found": Kind(404, "There is no such route"),
    "unknown-capture": Kind(404, "There is no such capture"),
    "unknown-job": Kind(404, "There is no such job"),
    "unknown-dataset": Kind(404, "There is no such dataset"),
    "method-not-allowed": Kind(405, "The route does not know this method"),
    "id-conflict": Kind(409, "The id is taken by another capture"),
    "in-flight": Kind(409, "The capture is under way"),
    "already-packed": Kind(409, "The capture is part of a shard"),
    "no-tensors": Kind(409, "The capture has no tensors"),
    "mixed-specs": Kind(409, "Captures of different specs may not stand in one dataset"),
    "too-large": Kind(413, "The capture is larger than the whole spool"),
    "unsupported-media-type": Kind(415, "The body is of another kind than this route takes"),
    "invalid-request": Kind(422, "The request is malformed"),
    "invalid-row": Kind(422, "The prompt cannot be used"),
    "too-long": Kind(422, "The prompt has more tokens than were asked for"),
    "capture-refused": Kind(422, "The capture was refused"),
    "export-refused": Kind(422, "The export cannot be done"),
    "no-tokenizer": Kind(422, "Messages cannot be laid out"),
    "internal-error": Kind(500, "The service has a fault"),
    "capture-failed": Kind(502, "The capture failed on the way", retriable=True),
    "engine-error": Kind(502, "SGLang answered with an error"),
    "engine-unreachable": Kind(502, "SGLang cannot be reached", retriable=True),
    "no-plugin": Kind(503, "No server with the plugin is running", retriable=True),
    "spool-full": Kind(503, "The spool has no room", retriable=True),
    "capture-timeout": Kind(504, "The capture did not appear in time", retriable=True),
    "cannot-pack": Kind(507, "The shard cannot be written", retriable=True),
}


class ProblemError(CaptureError):
    """A problem that a client is told about; ``detail`` says what was expected, what was found and what to do."""

    def __init__(self, kind: str, detail: str, **members: object):
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.members = members

    @property
    def status(self) -> int:
        return KINDS[self.kind].status

    @property
    def retriable(self) -> bool:
        return KINDS[self.kind].retriable

    def document(self) -> dict[str, Any]:
        """The problem document."""
        return {
            "type": TYPE_PREFIX + self.kind,
            "title": KINDS[self.kind].title,
            "status": self.status,
            "detail": self.detail,
            **self.members,
        }

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "5"}}.get(self.status)
        return JSONResponse(self.document(), status_code=self.status, media_type=MEDIA_TYPE, headers=headers)


def problem_responses(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """What a route's OpenAPI entry says of its problems, with the document of each as an example."""
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in (*kinds, "unauthorized"):
        document = ProblemError(kind, "what was expected, what was found, what to do").document()
        entry = responses.setdefault(KINDS[kind].status, {"description": "", "content": {MEDIA_TYPE: {"examples": {}}}})
        entry["description"] = "; ".join(filter(None, [entry["description"], KINDS[kind].title]))
        entry["content"][MEDIA_TYPE]["examples"][kind] = {"value": document}
    return responses


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error with a problem document."""

    @app.exception_handler(ProblemError)
    async def _problem(_request: Request, error: ProblemError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = [{"where": ".".join(map(str, e["loc"])), "what": e["msg"]} for e in error.errors()]
        detail = "; ".join(f"{fault['where']}: {fault['what']}" for fault in faults)
        return ProblemError("invalid-request", detail, errors=faults).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return ProblemError(
                "not-found", f"there is no {request.url.path} here; see /docs for the routes"
            ).response()
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "others")
            detail = f"{request.url.path} knows {allowed}, found {request.method}"
            return ProblemError("method-not-allowed", detail).response()
        return ProblemError("invalid-request", str(error.detail)).response()

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        detail = (
            f"{type(error).__name__}: this is a fault of sglang-capture; its log has the traceback, please report it"
        )
        return ProblemError("internal-error", detail).response()
