"""What every route needs: the service, and the paging parameters."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request

from sglang_capture.service.core import Service


def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


ServiceDep = Annotated[Service, Depends(_service)]

Cursor = Annotated[int | None, Query(ge=1, description="`next` of the page before")]

Limit = Annotated[int, Query(ge=1, le=1000, description="most items on a page")]
