"""``/capture/shards`` and ``/capture/export``: what becomes of captures."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, Query
from fastapi.concurrency import run_in_threadpool

from sglang_capture.errors import CaptureError
from sglang_capture.export import ExportSummary, export_dataset
from sglang_capture.service.core import Service
from sglang_capture.service.models import CaptureId, ExportRequest, PackAnswer, PackRequest, Page, ShardRecord
from sglang_capture.service.problems import ProblemError, problem_responses
from sglang_capture.service.routes.deps import Cursor, Limit, ServiceDep
from sglang_capture.service.routes.examples import SHARD, answer, page
from sglang_capture.shards import DatasetError

router = APIRouter(tags=["datasets"])

_PACK_REQUESTS = {
    "everything": {"summary": "all that is spooled, each spec into its dataset", "value": {}},
    "some": {
        "summary": "some captures into a dataset of one's own",
        "value": {"ids": ["conv-0001"], "dataset": "pilot"},
    },
}


@router.post(
    "/capture/shards",
    summary="Pack now",
    responses={
        **answer({"shards": [SHARD], "samples": 512}, "the shards that were written"),
        **problem_responses("unknown-capture", "no-tensors", "mixed-specs", "invalid-request", "cannot-pack"),
    },
)
async def pack(
    service: ServiceDep, request: Annotated[PackRequest | None, Body(openapi_examples=_PACK_REQUESTS)] = None
) -> PackAnswer:
    """Packs what is spooled without waiting for whole shards, and answers when it is on disk.

    Captures of different specs go to different datasets; into one `dataset` by name they are refused.
    """
    request = request or PackRequest()
    if request.dataset is not None:
        service.datasets.path(request.dataset)
    try:
        rows = await service.packer.pack(ids=request.ids, dataset=request.dataset)
    except DatasetError as error:
        raise ProblemError("cannot-pack", str(error)) from error
    written = await run_in_threadpool(service.catalog.shards.get, [row.seq for row in rows])
    shards = [ShardRecord.of(row, str(service.settings.data)) for row in written]
    return PackAnswer(shards=shards, samples=sum(shard.samples for shard in shards))


@router.get(
    "/capture/shards",
    summary="List shards",
    responses={**page(SHARD), **problem_responses("invalid-request")},
)
def list_shards(
    service: ServiceDep,
    dataset: Annotated[CaptureId | None, Query(description="only shards of this dataset")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Page[ShardRecord]:
    """Shards from the newest on."""
    rows = service.catalog.shards.page(dataset=dataset, before=cursor, limit=limit)
    items = [ShardRecord.of(row, str(service.settings.data)) for row in rows]
    return Page(items=items, next=rows[-1].seq if len(rows) == limit else None)


_EXPORT_REQUESTS = {
    "specforge": {"summary": "for SpecForge", "value": {"dataset": "dataset-8da27580", "to": "specforge"}}
}
_EXPORT_ANSWER = {
    "format": "specforge",
    "dataset": "/data/captures/dataset-8da27580",
    "out": "/data/captures/exports/dataset-8da27580-specforge",
    "samples": 512,
    "written": 512,
    "skipped": [],
    "bytes": 60146384896,
    "notes": [],
}


@router.post(
    "/capture/export",
    summary="Export a dataset",
    responses={
        **answer(_EXPORT_ANSWER, "what was exported"),
        **problem_responses("unknown-dataset", "path-not-allowed", "export-refused", "invalid-request"),
    },
)
async def export(
    request: Annotated[ExportRequest, Body(openapi_examples=_EXPORT_REQUESTS)], service: ServiceDep
) -> ExportSummary:
    """Writes a dataset in a trainer's format, as `sglang-capture export` does, and answers when it is done.

    An export that was broken off goes on when it is asked for again.
    """
    dataset = service.datasets.existing(request.dataset)
    out = _out(service, request)
    if request.model is not None and not service.settings.on_loopback:
        raise ProblemError(
            "path-not-allowed",
            "clients of another machine may name no directory of a model: export on the service's machine, with "
            "sglang-capture export",
        )
    try:
        return await run_in_threadpool(
            export_dataset, dataset, request.to, out, ids=request.ids, options=request.options
        )
    except CaptureError as error:
        raise ProblemError("export-refused", str(error)) from error


def _out(service: Service, request: ExportRequest) -> Path:
    """Where to export to: below ``<data>/exports``, or anywhere for clients on this machine.

    Raises:
        ProblemError: the path leaves the folder for exports (``path-not-allowed``), or no path can be like it.
    """
    _check_path("out", request.out or "")
    _check_path("model", request.model or "")
    exports = (service.settings.data / "exports").absolute()
    wanted = Path(request.out or f"{request.dataset}-{request.to}")
    if wanted.is_absolute():
        if service.settings.on_loopback:
            return wanted
        raise ProblemError(
            "path-not-allowed",
            f"clients of another machine may export below {exports} only: give a name without a leading slash",
        )
    if ".." in wanted.parts or not (exports / wanted).resolve().is_relative_to(exports.resolve()):
        raise ProblemError("path-not-allowed", f"{wanted} leaves {exports}: give a name below it, or an absolute path")
    return exports / wanted


def _check_path(name: str, path: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(path):
            return
    raise ProblemError("invalid-request", f"{name} holds a NUL byte or half a surrogate pair: found {path!r:.200}")
