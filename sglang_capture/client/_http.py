"""What both clients share."""

from __future__ import annotations

from typing import Any

import httpx

from sglang_capture.errors import UsageError

RETRIABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
"""HTTP statuses after which the same request may succeed later, unless the answer says otherwise."""

_CONNECT_SECONDS = 5.0


def open_http(
    url: str, api_key: str | None, timeout: float, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    """A client with as many connections as there are requests in flight, which ignores proxies in the environment.

    Raises:
        UsageError: ``url`` is none.
    """
    check_address(url)
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        transport=transport,
        trust_env=False,
    )


def check_address(url: str) -> None:
    """Raises UsageError if ``url`` is none that can be asked."""
    try:
        usable = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise UsageError(f"an address must look like http://127.0.0.1:30080; found {url!r}")


def read_json(response: httpx.Response) -> Any:
    """The answer's JSON, ``None`` if it is none: not every server at an address is the one that was meant."""
    try:
        return response.json()
    except ValueError:
        return None


def reason_of(error: BaseException) -> str:
    """What an error says; some of httpx's say nothing but their name."""
    return str(error) or type(error).__name__
