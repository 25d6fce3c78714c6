"""``/capture``: one capture, and the list of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from sglang_capture import spool
from sglang_capture.catalog import CaptureRow
from sglang_capture.catalog.tables import CaptureState
from sglang_capture.service.core import Service
from sglang_capture.service.models import CaptureId, CaptureRecord, CaptureRequest, Page
from sglang_capture.service.problems import ProblemError, problem_responses
from sglang_capture.service.routes.deps import Cursor, Limit, ServiceDep
from sglang_capture.service.routes.examples import RECORD, REQUESTS, answer, page
from sglang_capture.service.tensors import capture_tensors

router = APIRouter(tags=["captures"])


@router.post(
    "/capture",
    summary="Capture one prompt",
    responses={
        **answer(RECORD, "the record, once the dump is indexed; `Capture-Reused: true` if it was there already"),
        **problem_responses(
            "id-conflict",
            "too-large",
            "invalid-request",
            "invalid-row",
            "too-long",
            "capture-refused",
            "no-tokenizer",
            "capture-failed",
            "engine-error",
            "engine-unreachable",
            "no-plugin",
            "spool-full",
            "capture-timeout",
        ),
    },
)
async def make_capture(
    request: Annotated[CaptureRequest, Body(openapi_examples=REQUESTS)], service: ServiceDep, response: Response
) -> CaptureRecord:
    """Sends the prompt to SGLang, marked, and answers with the record when its dump is indexed.

    The request is held back while the spool has no room. A capture of the same id and the same content that is there
    already is answered at once; the same id with other content is a conflict.
    """
    ask = await run_in_threadpool(
        service.reader.read, request.row(), request, layers=request.layers, last_hidden=request.last_hidden
    )
    captured = await service.sender.capture(ask)
    response.headers["Capture-Reused"] = str(captured.reused).lower()
    return CaptureRecord.of(captured.row, str(service.settings.dir))


@router.get(
    "/capture",
    summary="List captures",
    responses={**page(RECORD), **problem_responses("invalid-request")},
)
def list_captures(
    service: ServiceDep,
    state: Annotated[CaptureState | None, Query(description="only captures in this state")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[CaptureRecord]:
    """Captures from the newest on. Pass `next` as `cursor` to go on; a page costs the same however many there are."""
    rows = service.catalog.captures.page(state=state, before=cursor, limit=limit)
    items = [CaptureRecord.of(row, str(service.settings.dir)) for row in rows]
    return Page(items=items, next=rows[-1].seq if len(rows) == limit else None)


@router.get(
    "/capture/{capture_id}",
    summary="Look up a capture",
    responses={**answer(RECORD), **problem_responses("unknown-capture", "invalid-request")},
)
def get_capture(capture_id: CaptureId, service: ServiceDep) -> CaptureRecord:
    """Its state, tokens, shapes and place, or why it failed."""
    return CaptureRecord.of(_known(service, capture_id), str(service.settings.dir))


@router.get(
    "/capture/{capture_id}/data",
    summary="Download a capture's tensors",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "a safetensors file: input_ids, hidden_states, the last hidden states, loss_mask if known",
            "content": {"application/octet-stream": {"example": "the bytes of a safetensors file"}},
        },
        **problem_responses("unknown-capture", "no-tensors", "invalid-request"),
    },
)
def get_data(capture_id: CaptureId, service: ServiceDep) -> StreamingResponse:
    """The tensors as the bytes of a safetensors file, from the dump or from the shard. Its header holds the spec."""
    row = _known(service, capture_id)
    tensors = capture_tensors(row, service.settings.dir, service.settings.data, service.catalog)
    size, pieces = tensors.safetensors()
    headers = {
        "Content-Length": str(size),
        "Content-Disposition": f'attachment; filename="{capture_id}.safetensors"',
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.delete(
    "/capture/{capture_id}",
    summary="Forget a capture",
    status_code=204,
    responses={
        204: {"description": "it is forgotten, and its memory is free", "content": {"text/plain": {"example": ""}}},
        **problem_responses("unknown-capture", "already-packed", "in-flight", "invalid-request"),
    },
)
async def forget_capture(capture_id: CaptureId, service: ServiceDep) -> None:
    """Removes the record, the dump and the failure. A capture that is packed stays: shards are never rewritten."""
    if service.sender.is_under_way(capture_id):
        raise ProblemError("in-flight", f"{capture_id} is under way: wait until it has ended, then forget it")
    async with service.packer.writing:
        await run_in_threadpool(_forget, service, capture_id)


def _forget(service: Service, capture_id: str) -> None:
    """The dump goes first: a record alone is found out at the next scan, a dump alone would be recorded anew."""
    row = _known(service, capture_id)
    if row.state == "packed" and row.shard is not None:
        raise ProblemError(
            "already-packed",
            f"{capture_id} is sample {row.sample} of {row.shard.dataset}/{row.shard.name}, and shards are never "
            "rewritten: leave it out when exporting (ids), or delete the dataset as a whole",
        )
    spool.remove(service.settings.dir, capture_id)
    service.catalog.captures.forget(capture_id)


def _known(service: Service, capture_id: str) -> CaptureRow:
    row = service.catalog.captures.get(capture_id)
    if row is None:
        raise ProblemError("unknown-capture", f"there is no capture {capture_id}; GET /capture lists them")
    return row
