"""The client of the side service (docs/http-api.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, cast
from urllib.parse import quote

import httpx

from sglang_capture.client._http import RETRIABLE_STATUS, open_http, read_json, reason_of
from sglang_capture.errors import CaptureError
from sglang_capture.prompts import Prompt
from sglang_capture.spec import LastHidden

SERVICE_URL = "http://127.0.0.1:30080"

_RETRIABLE_KINDS = frozenset({"in-flight"})
_FINAL_KINDS = frozenset({"engine-error", "internal-error"})


class ServiceError(CaptureError):
    """The side service answered with a problem document (docs/http-api.md lists the kinds).

    Attributes:
        kind: the last part of the document's ``type``, like ``id-conflict``; empty where there was no document.
        retriable: whether the same request may succeed later.
        retry_after: seconds after which the service suggests to try again, if it does.
    """

    def __init__(self, *, status: int, kind: str, title: str, detail: str, retry_after: float | None = None) -> None:
        super().__init__(f"{title}: {detail}" if title else detail)
        self.status = status
        self.kind = kind
        self.title = title
        self.detail = detail
        self.retry_after = retry_after

    @property
    def retriable(self) -> bool:
        return self.kind in _RETRIABLE_KINDS or (self.status in RETRIABLE_STATUS and self.kind not in _FINAL_KINDS)


class ServiceUnreachable(ServiceError):  # noqa: N818
    """The side service does not answer, or the connection broke."""

    def __init__(self, url: str, error: BaseException) -> None:
        detail = (
            f"nothing usable answers at {url} ({reason_of(error)}); start it beside the SGLang server with "
            "`sglang-capture serve`, or name its address with --service"
        )
        super().__init__(
            status=503, kind="service-unreachable", title="The side service cannot be reached", detail=detail
        )


class ServiceClient:
    """Talks to the side service; records, jobs and shards come as the JSON objects that docs/http-api.md describes.

    Every method raises :class:`ServiceError` where the service answers with a problem, and
    :class:`ServiceUnreachable` where it does not answer.

    Args:
        api_key: the service's ``SGLANG_CAPTURE_API_KEY``, if it is set.
        timeout: seconds to wait for an answer; a capture may be held back while the spool is full, and then queue.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        url: str = SERVICE_URL,
        *,
        api_key: str | None = None,
        timeout: float = 900.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._http = open_http(self.url, api_key, timeout, transport)

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def health(self) -> dict[str, Any]:
        """How the service, the plugin and the engine are; needs no API key."""
        return await self._object("GET", "/health")

    async def capture(
        self,
        prompt: Prompt | Mapping[str, Any],
        *,
        layers: Iterable[int] | None = None,
        last_hidden: LastHidden | None = None,
    ) -> dict[str, Any]:
        """Have a prompt captured, and wait for its record; a capture that is there already is not made again.

        The record's ``reused`` says whether it was.

        Args:
            prompt: or what the service takes itself: ``text``, ``messages`` or ``input_ids``, with ``capture_id``,
                ``loss_mask`` and ``metadata`` where wanted.
        """
        body = _request_of(prompt) if isinstance(prompt, Prompt) else dict(prompt)
        if layers is not None:
            body["layers"] = list(layers)
        if last_hidden is not None:
            body["last_hidden"] = last_hidden
        response = await self._request("POST", "/capture", json=body)
        return {**self._as_object(response), "reused": response.headers.get("Capture-Reused") == "true"}

    async def get(self, capture_id: str) -> dict[str, Any]:
        """The record of one capture."""
        return await self._object("GET", f"/capture/{quote(capture_id, safe='')}")

    async def data(self, capture_id: str) -> bytes:
        """The tensors of one capture, as the bytes of a safetensors file."""
        return (await self._request("GET", f"/capture/{quote(capture_id, safe='')}/data")).content

    async def forget(self, capture_id: str) -> None:
        """Drop a capture that is not packed, and free its memory."""
        await self._request("DELETE", f"/capture/{quote(capture_id, safe='')}")

    async def captures(self, *, state: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """The records of all captures (in one state), the newest first."""
        async for record in self._pages("/capture", {"state": state} if state else {}):
            yield record

    async def pack(self, *, ids: Iterable[str] | None = None, dataset: str | None = None) -> dict[str, Any]:
        """Pack what is spooled (or only ``ids``) into shards now; answers with the shards."""
        body = {"ids": None if ids is None else list(ids), "dataset": dataset}
        return await self._object("POST", "/capture/shards", json={k: v for k, v in body.items() if v is not None})

    async def shards(self) -> AsyncIterator[dict[str, Any]]:
        """The shards there are, the newest first."""
        async for record in self._pages("/capture/shards", {}):
            yield record

    async def start_job(self, **request: Any) -> dict[str, Any]:
        """Have the service itself capture many rows: ``rows`` or ``path``, and ``layers``, ``concurrency``…"""
        return await self._object("POST", "/capture/jobs", json=request)

    async def job(self, job_id: str) -> dict[str, Any]:
        """How far a job is."""
        return await self._object("GET", f"/capture/jobs/{quote(job_id, safe='')}")

    async def jobs(self) -> AsyncIterator[dict[str, Any]]:
        """The jobs there were, the newest first."""
        async for record in self._pages("/capture/jobs", {}):
            yield record

    async def cancel_job(self, job_id: str) -> None:
        """Stop a job; what it captured stays."""
        await self._request("DELETE", f"/capture/jobs/{quote(job_id, safe='')}")

    async def _pages(self, path: str, query: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        cursor = None
        while True:
            page = await self._object("GET", path, params=query if cursor is None else {**query, "cursor": cursor})
            for item in page["items"]:
                yield item
            cursor = page.get("next")
            if cursor is None:
                return

    async def _object(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        return self._as_object(await self._request(method, path, **request))

    def _as_object(self, response: httpx.Response) -> dict[str, Any]:
        answer = read_json(response)
        if not isinstance(answer, dict):
            detail = f"what answers at {self.url} is not the side service of sglang-capture"
            raise ServiceError(status=502, kind="", title="", detail=detail)
        return cast("dict[str, Any]", answer)

    async def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise ServiceUnreachable(self.url, error) from error
        if response.is_success:
            return response
        raise _problem(response)


def _request_of(prompt: Prompt) -> dict[str, Any]:
    """The body of ``POST /capture``; an id that stands for the content alone is left for the service to make."""
    body = {
        "capture_id": prompt.capture_id if prompt.named else None,
        "input_ids": prompt.input_ids,
        "text": prompt.text,
        "loss_mask": prompt.loss_mask,
        "metadata": prompt.metadata or None,
    }
    return {key: value for key, value in body.items() if value is not None}


def _problem(response: httpx.Response) -> ServiceError:
    document = read_json(response)
    if not isinstance(document, dict):
        document = {}
    after = response.headers.get("Retry-After", "")
    return ServiceError(
        status=response.status_code,
        kind=str(document.get("type", "")).rpartition(":")[2],
        title=str(document.get("title", "")),
        detail=str(document.get("detail") or f"{response.request.url} answered {response.status_code}"),
        retry_after=float(after) if after.isdigit() else None,
    )
