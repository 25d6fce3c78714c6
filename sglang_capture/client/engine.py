"""The client of an SGLang server: sends prompts so that they are captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_capture.client._http import RETRIABLE_STATUS, open_http, read_json, reason_of
from sglang_capture.errors import CaptureError
from sglang_capture.mark import build_mark
from sglang_capture.prompts import Prompt
from sglang_capture.spec import LastHidden

_GENERATION_SECONDS = 3600.0
"""How long an answer may take: thousands of tokens, on a server that writes hundreds of answers at once."""


class EngineError(CaptureError):
    """An SGLang server did not do what was asked; ``retriable`` says whether it may at another time."""

    def __init__(self, message: str, *, retriable: bool) -> None:
        super().__init__(message)
        self.retriable = retriable


class EngineUnreachable(EngineError):  # noqa: N818
    """Nothing answers at the server's address."""

    def __init__(self, url: str, reason: object) -> None:
        super().__init__(
            f"no SGLang server answers at {url} ({reason}); is it started, has it loaded its model, is the port right?",
            retriable=True,
        )


@dataclass(frozen=True)
class ServerInfo:
    """What an SGLang server says of itself.

    Attributes:
        longest_prompt: a prompt must have fewer tokens than this.
        port: where it listens, by its own arguments.
        chunk_size: most tokens of a prompt that it computes at once; 0 if prompts are never cut.
        room: tokens that its cache holds in all.
        dp_size: engines that share the requests.

    ``None`` stands for what the server does not say.
    """

    model_path: str
    tokenizer_path: str
    served_name: str
    version: str
    architecture: str
    longest_prompt: int | None
    port: int | None = None
    chunk_size: int | None = None
    room: int | None = None
    dp_size: int = 1


@dataclass(frozen=True)
class Answer:
    """What a server wrote.

    Attributes:
        ids: its tokens, the one that ended it included.
        finish_reason: ``stop`` (it came to its end) or ``length`` (it was cut).
        end: how many of ``ids``, at their end, are no text but the end itself: 0 or 1.
    """

    ids: list[int]
    finish_reason: str
    end: int


class SGLangClient:
    """Sends prompts to one SGLang server so that they are captured.

    Args:
        token: what the server's ``SGLANG_CAPTURE_TOKEN`` says, if it is set.
        api_key: what the server was started with as ``--api-key``, if it was.
        timeout: seconds to wait for an answer; a prompt may stand in the server's queue for long.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._http = open_http(self.url, api_key, timeout, transport)

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def server_info(self) -> ServerInfo:
        """What runs there.

        Raises:
            EngineError: it cannot be reached, wants an API key, or does not answer as an SGLang server does.
        """
        try:
            model = await self._request("GET", "/model_info")
            server = await self._request("GET", "/server_info")
            chunk = server.get("chunked_prefill_size")
            return ServerInfo(
                model_path=model["model_path"],
                tokenizer_path=model["tokenizer_path"],
                served_name=server.get("served_model_name") or model["model_path"],
                version=server["version"],
                architecture=next(iter(model.get("architectures") or []), ""),
                longest_prompt=server.get("max_req_input_len"),
                port=server.get("port"),
                chunk_size=None if chunk is None else max(0, chunk),
                room=server.get("max_total_num_tokens"),
                dp_size=server.get("dp_size") or 1,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self.url} answers, but not as an SGLang server does: {error!r}", retriable=False
            ) from error

    async def capture(
        self,
        prompt: Prompt,
        *,
        layers: Iterable[int] | None = None,
        last_hidden: LastHidden | None = None,
        request_id: str | None = None,
    ) -> None:
        """Have the server compute a prompt, marked; its dump appears in the server's spool, or the reason why not.

        Args:
            request_id: what the dump will say it was captured from; unset: the server makes one.

        Raises:
            EngineError: the server refused the prompt (too long, say), was stopped, or could not be reached.
            MarkError: the layers or the kind of last hidden state are malformed.
        """
        mark = build_mark(prompt.capture_id, layers=layers, last_hidden=last_hidden, token=self._token)
        content = {"text": prompt.text} if prompt.input_ids is None else {"input_ids": prompt.input_ids}
        sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": mark}
        named = {} if request_id is None else {"rid": request_id}
        _finish_reason(await self._request("POST", "/generate", {**content, **named, "sampling_params": sampling}))

    async def generate(self, input_ids: Sequence[int], *, max_new_tokens: int, temperature: float) -> Answer:
        """Have the server go on behind ``input_ids``, unmarked.

        Raises:
            EngineError: as :meth:`capture`.
        """
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        body = {"input_ids": list(input_ids), "sampling_params": sampling}
        answer = await self._request("POST", "/generate", body, timeout=_GENERATION_SECONDS)
        reason = _finish_reason(answer)
        ids = answer.get("output_ids") if isinstance(answer, dict) else None
        if not ids or "type" not in reason:
            raise EngineError(f"{self.url}/generate answered without ids or without why they end", retriable=False)
        return Answer(list(ids), reason["type"], int(reason.get("matched") == ids[-1]))

    async def _request(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        usual = self._http.timeout
        patience = usual if timeout is None else httpx.Timeout(timeout, connect=usual.connect, pool=usual.pool)
        try:
            response = await self._http.request(method, path, json=body, timeout=patience)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineUnreachable(self.url, reason_of(error)) from error
        except httpx.HTTPError as error:
            raise EngineError(f"the connection to {self.url} broke: {reason_of(error)}", retriable=True) from error
        if response.is_success:
            return read_json(response)
        message = f"{self.url}{path} answered {response.status_code}: {_sglang_message(response)}"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += "; the server was started with --api-key: give the client the same key"
        raise EngineError(message, retriable=response.status_code in RETRIABLE_STATUS)


def _finish_reason(answer: Any) -> dict[str, Any]:
    """Why an answer ends.

    Raises:
        EngineError: it was broken off.
    """
    reason = answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None
    if not isinstance(reason, dict):
        return {}
    if reason.get("type") == "abort":
        raise EngineError(f"the server broke the request off: {reason.get('message', 'aborted')}", retriable=True)
    return reason


def _sglang_message(response: httpx.Response) -> str:
    """SGLang puts its message under ``error.message``, ``error`` or ``message``, by route."""
    answer = read_json(response)
    found = answer.get("error", answer.get("message")) if isinstance(answer, dict) else None
    if isinstance(found, dict):
        found = found.get("message")
    return str(found or response.text or response.reason_phrase)[:500]
