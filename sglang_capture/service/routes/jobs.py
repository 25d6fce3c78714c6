"""``/capture/jobs``: whole JSONL files."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent

from sglang_capture.layers import LayerError, parse_layers
from sglang_capture.service.core import Service
from sglang_capture.service.models import JobOptions, JobRecord, JobRequest, Page
from sglang_capture.service.options import GenerateOptions
from sglang_capture.service.problems import ProblemError, problem_responses
from sglang_capture.service.routes.deps import Cursor, Limit, ServiceDep
from sglang_capture.service.routes.examples import JOB, answer, page

router = APIRouter(tags=["jobs"])

JSON_LINES = ("application/x-ndjson", "application/jsonl")

Model = TypeVar("Model", bound=BaseModel)

_CHUNK = 1 << 20
_EVENT_SECONDS = 0.5
_SHOWN_ERRORS = 100

_REQUEST_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": JobRequest.model_json_schema(),
            "examples": {
                "path": {"value": {"path": "/data/train.jsonl", "concurrency": 64}},
                "rows": {"value": {"rows": [{"id": "a", "text": "The capital of France is"}]}},
            },
        },
        JSON_LINES[0]: {
            "schema": {"type": "string", "description": "the file itself; options go into the query"},
            "example": '{"id": "a", "text": "The capital of France is"}\n{"id": "b", "input_ids": [1, 2, 3]}\n',
        },
    },
}


@router.post(
    "/capture/jobs",
    summary="Capture a whole JSONL",
    openapi_extra={"requestBody": _REQUEST_BODY},
    responses={
        **answer(JOB, "the job, just started"),
        **problem_responses("path-not-allowed", "unsupported-media-type", "invalid-request", "no-plugin"),
    },
)
async def start_job(
    request: Request,
    service: ServiceDep,
    layers: Annotated[str | None, Query(description="for an upload: hidden-state indices, like `3,31,59`")] = None,
    last_hidden: Annotated[str | None, Query(description="for an upload: none, post, pre or both")] = None,
    concurrency: Annotated[int | None, Query(description="for an upload: most captures in flight")] = None,
    max_length: Annotated[int | None, Query(description="for an upload: most tokens of a conversation")] = None,
    only_last_turn: Annotated[bool | None, Query(description="for an upload: supervise only the last answer")] = None,
    generate: Annotated[
        str | None, Query(description='for an upload: as JSON, like `{"max_new_tokens": 512, "temperature": 0}`')
    ] = None,
) -> JobRecord:
    """Starts a job on the rows of a JSONL: as JSON (`rows` or `path`), or uploaded as `application/x-ndjson`.

    A row has exactly one of `messages`, `conversations`, `instruction`, `prompt` (or `text`) and `input_ids`, and may
    have `id`, `loss_mask` and `metadata`. A bad row becomes an error of the job, with its line number; the others go
    on. Jobs survive a restart of the service, and do nothing twice.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in JSON_LINES:
        given = {
            "layers": _layers(layers),
            "last_hidden": last_hidden,
            "concurrency": concurrency,
            "max_length": max_length,
            "only_last_turn": only_last_turn,
            "generate": None if generate is None else _checked(GenerateOptions.model_validate_json, generate),
        }
        options = _checked(JobOptions.model_validate, {k: v for k, v in given.items() if v is not None})
        return await service.jobs.create("upload", request.stream(), options)
    if kind != "application/json":
        raise ProblemError(
            "unsupported-media-type",
            f"send rows or a path as application/json, or the file itself as {JSON_LINES[0]}; found {kind or 'none'}",
        )
    wanted = _checked(JobRequest.model_validate_json, await request.body())
    options = JobOptions(**wanted.model_dump(include=set(JobOptions.model_fields)))
    if (wanted.rows is None) == (wanted.path is None):
        raise ProblemError("invalid-request", "give exactly one of rows and path")
    if wanted.rows is not None:
        return await service.jobs.create("rows", _lines(wanted.rows), options)
    path = _readable(service, wanted.path or "")
    return await service.jobs.create(str(path), _file_chunks(path), options)


@router.get("/capture/jobs", summary="List jobs", responses={**page(JOB), **problem_responses("invalid-request")})
async def list_jobs(service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> Page[JobRecord]:
    """Jobs from the newest on, without their errors."""
    rows = await run_in_threadpool(service.catalog.jobs.page, before=cursor, limit=limit)
    items = [service.jobs.describe(row) for row in rows]
    return Page(items=items, next=rows[-1].seq if len(rows) == limit else None)


@router.get(
    "/capture/jobs/{job_id}",
    summary="How far a job is",
    responses={**answer(JOB), **problem_responses("unknown-job", "invalid-request")},
)
async def get_job(
    job_id: str,
    service: ServiceDep,
    after: Annotated[int, Query(ge=0, description="show the errors behind this line")] = 0,
) -> JobRecord:
    """Progress, rate, time left, and up to 100 errors."""
    return await service.jobs.record(job_id, errors=_SHOWN_ERRORS, after=after)


@router.delete(
    "/capture/jobs/{job_id}",
    summary="Cancel a job",
    responses={
        **answer({**JOB, "state": "cancelled"}, "the job as it ended"),
        **problem_responses("unknown-job", "invalid-request"),
    },
)
async def cancel_job(job_id: str, service: ServiceDep) -> JobRecord:
    """Stops a job; what it captured stays. A job that has ended is left as it is."""
    return await service.jobs.cancel(job_id)


@router.get(
    "/capture/jobs/{job_id}/events",
    summary="Watch a job",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "server-sent events: `progress` with the job's record when it changes, `end` at its end",
            "content": {"text/event-stream": {"example": f"event: progress\ndata: {json.dumps(JOB)}\n\n"}},
        },
        **problem_responses("unknown-job", "invalid-request"),
    },
)
async def watch_job(job_id: str, service: ServiceDep) -> EventSourceResponse:
    """Server-sent events: the record whenever it changes, at most twice a second; `end` is the last."""
    first = await service.jobs.record(job_id)
    return EventSourceResponse(_events(service, first))


async def _events(service: Service, record: JobRecord) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(event="progress", data=record.model_dump_json())
    while record.state == "running":
        await asyncio.sleep(_EVENT_SECONDS)
        newer = await service.jobs.record(record.id)
        if newer != record:
            yield ServerSentEvent(event="progress", data=newer.model_dump_json())
        record = newer
    record = await service.jobs.record(record.id, errors=_SHOWN_ERRORS)
    yield ServerSentEvent(event="end", data=record.model_dump_json())


def _layers(text: str | None) -> list[int] | None:
    try:
        return list(parse_layers(text)) if text else None
    except LayerError as error:
        raise ProblemError("invalid-request", str(error)) from error


def _checked(validate: Callable[[Any], Model], content: object) -> Model:
    try:
        return validate(content)
    except ValidationError as error:
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error


async def _lines(rows: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    for row in rows:
        yield json.dumps(row).encode() + b"\n"


def _readable(service: Service, path: str) -> Path:
    """A file that the client may have the service read.

    Raises:
        ProblemError: clients of other machines may not name files, or there is no such file.
    """
    if not service.settings.on_loopback:
        raise ProblemError(
            "path-not-allowed",
            f"this service listens on other addresses than loopback: upload the file as {JSON_LINES[0]}",
        )
    found = Path(path)
    with contextlib.suppress(OSError):  # a name that is too long for any file
        if found.is_absolute() and found.is_file():
            return found
    raise ProblemError("invalid-request", f"path must be the absolute path of a JSONL file; found {path!r:.200}")


async def _file_chunks(path: Path) -> AsyncIterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := await run_in_threadpool(file.read, _CHUNK):
                yield chunk
    except OSError as error:
        raise ProblemError("invalid-request", f"{path} cannot be read: {error.strerror}") from error
