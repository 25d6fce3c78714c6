"""What is sent to the side service, and how its problems arrive. (The real service: tests/test_service*.py.)"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest

from sglang_capture.client import ServiceClient, ServiceError, ServiceUnreachable
from sglang_capture.prompts import parse_row

Handler = Callable[[httpx.Request], httpx.Response]
T = TypeVar("T")

PROBLEM = "urn:sglang-capture:problem:"


def call(handler: Handler, use: Callable[[ServiceClient], Awaitable[T]], **options: Any) -> T:
    async def main() -> T:
        async with ServiceClient("http://service", transport=httpx.MockTransport(handler), **options) as client:
            return await use(client)

    return asyncio.run(main())


def sent(row: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The body that capturing a row posts."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/capture")
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"id": "x"})

    call(answer, lambda client: client.capture(parse_row(row, None), **options))
    return bodies[0]


def test_a_prompt_is_sent_with_all_that_belongs_to_it() -> None:
    row = {"id": "c", "input_ids": [1, 2], "loss_mask": [0, 1], "metadata": {"source": "s"}}
    body = sent(row, layers=(1, 2), last_hidden="pre")
    assert body.pop("capture_id") == "c"
    assert body == {
        **{k: row[k] for k in ("input_ids", "loss_mask", "metadata")},
        "layers": [1, 2],
        "last_hidden": "pre",
    }


def test_what_is_not_set_is_not_sent() -> None:
    """Without an id of the row's own, the service makes one: it depends on the layers, which it alone knows."""
    assert sent({"text": "hi"}) == {"text": "hi"}


@pytest.mark.parametrize("reused", [True, False])
def test_a_record_says_whether_it_was_there_already(reused: bool) -> None:
    answer = httpx.Response(200, json={"id": "x"}, headers={"Capture-Reused": str(reused).lower()})
    record = call(lambda _request: answer, lambda client: client.capture({"text": "hi"}))
    assert record == {"id": "x", "reused": reused}


def failing(answer: httpx.Response) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call(lambda _request: answer, lambda client: client.get("x"))
    return caught.value


def problem(status: int, kind: str, **headers: str) -> httpx.Response:
    document = {"type": PROBLEM + kind, "title": "Title", "status": status, "detail": "what to do"}
    return httpx.Response(status, json=document, headers=headers)


def test_a_problem_document_arrives_whole() -> None:
    error = failing(problem(503, "spool-full", **{"Retry-After": "5"}))
    assert (error.status, error.kind, error.title, error.detail) == (503, "spool-full", "Title", "what to do")
    assert str(error) == "Title: what to do"
    assert error.retry_after == 5


@pytest.mark.parametrize(
    ("status", "kind", "retriable"),
    [
        (503, "spool-full", True),
        (503, "no-plugin", True),
        (504, "capture-timeout", True),
        (507, "cannot-pack", True),
        (502, "capture-failed", True),
        (502, "engine-unreachable", True),
        (502, "engine-error", False),
        (500, "internal-error", False),
        (409, "in-flight", True),
        (409, "id-conflict", False),
        (413, "too-large", False),
        (422, "invalid-row", False),
        (401, "unauthorized", False),
    ],
)
def test_only_what_may_mend_is_tried_again(status: int, kind: str, retriable: bool) -> None:
    assert failing(problem(status, kind)).retriable is retriable


def test_an_error_page_of_something_in_between_is_an_error_too() -> None:
    error = failing(httpx.Response(502, text="<html>Bad gateway"))
    assert error.retriable and error.kind == ""
    assert "http://service/capture/x answered 502" in str(error)


def test_another_server_at_the_address_is_told_apart() -> None:
    assert "is not the side service" in str(failing(httpx.Response(200, text="hello")))


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadError(""), httpx.ReadTimeout("")])
def test_a_service_that_does_not_answer_says_how_to_start_it(error: httpx.HTTPError) -> None:
    def fail(_request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(ServiceUnreachable, match=r"http://service .*sglang-capture serve") as caught:
        call(fail, lambda client: client.health())
    assert caught.value.retriable


def test_the_key_is_sent() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"key": request.headers["Authorization"]})

    assert call(answer, lambda client: client.health(), api_key="k") == {"key": "Bearer k"}


def test_lists_are_followed_from_page_to_page() -> None:
    queries: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        query = dict(request.url.params)
        queries.append(query)
        start = int(query.get("cursor", 9))
        return httpx.Response(200, json={"items": [{"id": start}], "next": start - 1 if start > 7 else None})

    async def ids(client: ServiceClient) -> list[int]:
        return [record["id"] async for record in client.captures(state="packed")]

    assert call(answer, ids) == [9, 8, 7]
    assert queries == [{"state": "packed"} | cursor for cursor in ({}, {"cursor": "8"}, {"cursor": "7"})]


def test_packing_sends_only_what_is_asked_for() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"path": request.url.path, "body": json.loads(request.content)})

    assert call(answer, lambda client: client.pack()) == {"path": "/capture/shards", "body": {}}
    assert call(answer, lambda client: client.pack(ids=["a"], dataset="d"))["body"] == {"ids": ["a"], "dataset": "d"}
