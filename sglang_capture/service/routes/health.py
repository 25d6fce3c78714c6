"""``/health`` and ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CONTENT_TYPE_LATEST

from sglang_capture.service.models import Health
from sglang_capture.service.problems import problem_responses
from sglang_capture.service.routes.deps import ServiceDep
from sglang_capture.service.routes.examples import answer

router = APIRouter(tags=["service"])
keyed_router = APIRouter(tags=["service"])

_EXAMPLE = {
    "status": "degraded",
    "problems": [
        "no server with the plugin uses the spool /dev/shm/sglang_capture: start SGLang with "
        "SGLANG_PLUGINS=sglang_capture and the same SGLANG_CAPTURE_DIR as this service"
    ],
    "version": "0.1.0",
    "spool": "/dev/shm/sglang_capture",
    "data": "/data/captures",
    "plugin": None,
    "engine": {"url": "http://127.0.0.1:30000", "reachable": True, "problem": ""},
}


@router.get("/health", summary="How everything is", responses=answer(_EXAMPLE))
async def health(service: ServiceDep) -> Health:
    """Answers 200 as long as the service lives, with the plugin's own status and whether SGLang answers.

    `problems` lists what is wrong, and what to do about it. Needs no API key.
    """
    return await service.health()


@keyed_router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"example": 'sglang_capture_captures{state="packed"} 4100.0\n'}}},
        **problem_responses(),
    },
)
async def metrics(service: ServiceDep) -> Response:
    """Captures, tokens and bytes by state, the spool's room, what was sent and packed, jobs."""
    return Response(await run_in_threadpool(service.metrics.render), media_type=CONTENT_TYPE_LATEST)
