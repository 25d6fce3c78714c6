"""The FastAPI application around a :class:`~sglang_capture.service.core.Service`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from sglang_capture.service import problems
from sglang_capture.service.core import VERSION, Service
from sglang_capture.service.routes import captures, health, jobs, shards
from sglang_capture.service.security import Guard

_DESCRIPTION = """\
Captures hidden states from the SGLang server beside it, and keeps them as safetensors shards.

Errors are problem documents (RFC 9457); docs/http-api.md explains each kind. Times are seconds since the epoch.
"""


def create_app(service: Service) -> FastAPI:
    """The application; the service starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="sglang-capture", version=VERSION, description=_DESCRIPTION, lifespan=lifespan)
    app.state.service = service
    problems.install(app)
    app.add_middleware(Guard, settings=service.settings)
    app.include_router(health.router)
    # Guard checks the key; this only has OpenAPI say that there may be one.
    keyed = [Depends(HTTPBearer(auto_error=False, description="SGLANG_CAPTURE_API_KEY, where it is set"))]
    # Jobs and shards come first: their paths would be capture ids to the others.
    for router in (health.keyed_router, jobs.router, shards.router, captures.router):
        app.include_router(router, dependencies=keyed)
    return app
