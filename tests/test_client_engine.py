"""What is sent to an SGLang server, and which of its failures may be tried again. (Real servers: tests/engine.)"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglang_capture.client import Answer, EngineError, EngineUnreachable, ServerInfo, SGLangClient
from sglang_capture.errors import UsageError
from sglang_capture.mark import Mark, MarkError, parse_mark
from sglang_capture.prompts import Prompt, parse_row

Handler = Callable[[httpx.Request], httpx.Response]

GOOD: dict[str, Any] = {"text": "a", "meta_info": {"finish_reason": {"type": "length", "length": 1}}}


def capture(handler: Handler, prompt: Prompt, *, token: str | None = None, **options: Any) -> None:
    async def call() -> None:
        async with SGLangClient("http://engine", token=token, transport=httpx.MockTransport(handler)) as client:
            await client.capture(prompt, **options)

    asyncio.run(call())


def sent(prompt: Prompt, **options: Any) -> dict[str, Any]:
    """The body of the one request that a capture makes."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/generate")
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=GOOD)

    capture(answer, prompt, **options)
    (body,) = bodies
    return body


def test_ids_go_as_they_are_with_a_mark_that_the_server_understands() -> None:
    body = sent(parse_row({"id": "c1", "input_ids": [3, 4]}, None), layers=[5, 2], last_hidden="both", token="secret")
    assert body["input_ids"] == [3, 4] and "text" not in body
    sampling = body["sampling_params"]
    assert sampling["max_new_tokens"] == 1
    assert parse_mark(sampling["custom_params"], token="secret") == Mark("c1", (2, 5), "both")


def test_text_goes_as_text_and_the_server_decides_what_is_not_asked_for() -> None:
    body = sent(parse_row({"id": "c1", "text": "hi"}, None))
    assert body["text"] == "hi" and "input_ids" not in body
    assert body["sampling_params"]["custom_params"] == {"capture": "c1"}


def test_a_mark_that_no_server_would_take_is_not_sent() -> None:
    with pytest.raises(MarkError, match="named once"):
        sent(parse_row({"text": "hi"}, None), layers=[3, 3])


@pytest.mark.parametrize(
    ("answer", "message", "retriable"),
    [
        (
            httpx.Response(400, json={"error": {"message": "The input (9 tokens) is longer"}}),
            "The input (9 tokens)",
            False,
        ),
        (httpx.Response(400, json={"error": "Unexpected field"}), "answered 400: Unexpected field", False),
        (httpx.Response(400, json={"object": "error", "message": "bad params"}), "bad params", False),
        (httpx.Response(401, json={"error": "Unauthorized"}), "give the client the same key", False),
        (httpx.Response(429, text="slow down"), "slow down", True),
        (httpx.Response(500, text="Internal Server Error"), "Internal Server Error", True),
        (httpx.Response(503), "Service Unavailable", True),
        (
            httpx.Response(200, json={"meta_info": {"finish_reason": {"type": "abort", "message": "stopped"}}}),
            "broke the request off: stopped",
            True,
        ),
    ],
    ids=["too long", "contract", "parameters", "key", "busy", "fault", "starting", "aborted"],
)
def test_a_failure_carries_the_servers_words_and_whether_to_try_again(
    answer: httpx.Response, message: str, retriable: bool
) -> None:
    with pytest.raises(EngineError) as caught:
        capture(lambda _request: answer, parse_row({"text": "hi"}, None))
    assert message in str(caught.value)
    assert caught.value.retriable is retriable


def test_a_server_that_is_not_there_is_named_with_what_to_check() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with pytest.raises(
        EngineUnreachable, match=r"no SGLang server answers at http://engine .*refused.* port"
    ) as caught:
        capture(refuse, parse_row({"text": "hi"}, None))
    assert caught.value.retriable


def test_a_connection_that_breaks_may_be_tried_again() -> None:
    def reset(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("server disconnected", request=request)

    with pytest.raises(EngineError, match="server disconnected") as caught:
        capture(reset, parse_row({"text": "hi"}, None))
    assert caught.value.retriable and not isinstance(caught.value, EngineUnreachable)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "stop", "matched": 8}, Answer([7, 8], "stop", 1)),
        ({"type": "stop", "matched": "a text"}, Answer([7, 8], "stop", 0)),
        ({"type": "length", "length": 2}, Answer([7, 8], "length", 0)),
    ],
)
def test_an_answer_is_its_ids_and_why_they_end(reason: dict[str, Any], expected: Answer) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"output_ids": [7, 8], "meta_info": {"finish_reason": reason}})

    async def call() -> Answer:
        async with SGLangClient("http://engine/", transport=httpx.MockTransport(answer)) as client:
            return await client.generate([1, 2], max_new_tokens=9, temperature=0.5)

    assert asyncio.run(call()) == expected
    assert asked == [{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9, "temperature": 0.5}}]


def info(handler: Handler, api_key: str | None = None) -> ServerInfo:
    async def call() -> ServerInfo:
        async with SGLangClient("http://engine/", api_key=api_key, transport=httpx.MockTransport(handler)) as client:
            return await client.server_info()

    return asyncio.run(call())


def test_a_server_says_what_it_serves() -> None:
    answers = {
        "/model_info": {"model_path": "/m", "tokenizer_path": "/t", "architectures": ["DeepseekV3ForCausalLM"]},
        "/server_info": {"served_model_name": "kimi", "version": "0.5.23", "max_req_input_len": 4090},
    }

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer k"
        return httpx.Response(200, json=answers[request.url.path])

    assert info(answer, api_key="k") == ServerInfo("/m", "/t", "kimi", "0.5.23", "DeepseekV3ForCausalLM", 4090)


@pytest.mark.parametrize("answer", [httpx.Response(200, text="<html>"), httpx.Response(200, json={"other": 1})])
def test_something_else_at_the_address_is_told_apart(answer: httpx.Response) -> None:
    with pytest.raises(EngineError, match="not as an SGLang server does"):
        info(lambda _request: answer)


@pytest.mark.parametrize("url", ["localhost:30000", "127.0.0.1", "http://", "ftp://x", "http://x:y"])
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError, match="must look like"):
        SGLangClient(url)
