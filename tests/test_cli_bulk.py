"""Rows on their way to the service: how many at once, what is tried again, and when it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from sglang_capture.client import ServiceClient, ServiceError
from sglang_capture.commands import _bulk
from sglang_capture.commands._bulk import BulkSender, Fault, MaskCount, RowReader, Tally
from sglang_capture.errors import CaptureError
from sglang_capture.prompts import ChatTokenizer, Layout, RowError, read_jsonl

Answer = httpx.Response | Exception
Script = Callable[[dict[str, Any], int], Answer]
"""What the service answers to a body, given how often it was sent before."""

RECORD = {"tokens": 2, "bytes": 10}
CREATED = httpx.Response(200, json=RECORD, headers={"Capture-Reused": "false"})
REUSED = httpx.Response(200, json=RECORD, headers={"Capture-Reused": "true"})


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bulk, "pause_seconds", lambda _error, _attempt: 0.001)


class ScriptedService:
    """A service that follows a script, and notes what it was sent."""

    def __init__(self, script: Script) -> None:
        self.sent: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._script = script

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        before = self.sent.count(body)
        self.sent.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        answer = self._script(body, before)
        if isinstance(answer, Exception):
            raise answer
        return answer


def send(
    service: ScriptedService,
    rows: Sequence[dict[str, Any] | str],
    *,
    tokenizer: ChatTokenizer | None = None,
    vocab_size: int | None = None,
    patience: float = 60,
    concurrency: int = 4,
    layout: Layout = Layout(),  # noqa: B008 - frozen
    generate: dict[str, Any] | None = None,
    during: Callable[[BulkSender], None] = lambda _sender: None,
    **options: Any,
) -> Tally:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]

    async def main() -> Tally:
        async with ServiceClient("http://service", transport=httpx.MockTransport(service)) as client:
            reader = RowReader(read_jsonl(lines), lambda: tokenizer, vocab_size, layout=layout, generate=generate)
            sender = BulkSender(client, reader, concurrency=concurrency, patience=patience, **options)
            asyncio.get_running_loop().call_soon(during, sender)
            return await sender.run()

    return asyncio.run(main())


def texts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"c{number}", "text": f"text {number}"} for number in range(count)]


def problem(status: int, kind: str) -> httpx.Response:
    return httpx.Response(status, json={"type": f"urn:sglang-capture:problem:{kind}", "title": kind, "detail": "why"})


def test_every_row_is_sent_once_and_counted() -> None:
    service = ScriptedService(lambda _body, _before: CREATED)
    tally = send(service, texts(20), layers=(3, 5), last_hidden="pre")
    assert sorted(body["capture_id"] for body in service.sent) == sorted(f"c{number}" for number in range(20))
    assert all(body["layers"] == [3, 5] and body["last_hidden"] == "pre" for body in service.sent)
    assert (tally.captured, tally.tokens, tally.bytes, tally.settled) == (20, 40, 200, 20)


def test_what_was_there_already_is_not_counted_as_captured() -> None:
    tally = send(ScriptedService(lambda _body, _before: REUSED), texts(3))
    assert (tally.captured, tally.reused, tally.tokens) == (0, 3, 0)


@pytest.mark.parametrize("concurrency", [1, 5])
def test_never_more_than_so_many_are_in_flight(concurrency: int) -> None:
    service = ScriptedService(lambda _body, _before: CREATED)
    send(service, texts(40), concurrency=concurrency)
    assert service.most_at_once <= concurrency


def test_rows_that_repeat_an_earlier_one_are_not_sent() -> None:
    service = ScriptedService(lambda _body, _before: CREATED)
    tally = send(
        service, [{"text": "a"}, {"text": "b"}, {"text": "a"}, {"id": "x", "text": "a"}, {"id": "x", "text": "a"}]
    )
    assert (tally.captured, tally.duplicates) == (3, 2)
    assert len(service.sent) == 3


def test_a_bad_row_is_named_by_its_line_and_the_rest_goes_on() -> None:
    faults: list[Fault] = []
    service = ScriptedService(lambda _body, _before: CREATED)
    rows = [{"text": "a"}, "{", {"text": "b", "id": [1]}, {"input_ids": [7, 8]}, {"input_ids": [9]}]
    tally = send(service, rows, vocab_size=9, on_fault=faults.append)
    assert (tally.captured, tally.bad_rows) == (2, 3)
    assert sorted(fault.line for fault in faults) == [2, 3, 5]
    assert sorted(tally.faults, key=lambda fault: fault.line)[2].reason.startswith(
        "token id 9 at position 0 is outside"
    )


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        problem(503, "no-plugin"),
        problem(503, "spool-full"),
        problem(502, "engine-unreachable"),
        problem(409, "in-flight"),
    ],
    ids=["down", "broken", "no plugin", "full", "no engine", "under way"],
)
def test_a_row_waits_as_long_as_something_else_is_to_blame(failure: Answer) -> None:
    service = ScriptedService(lambda _body, before: failure if before < 10 else CREATED)
    tally = send(service, texts(2))
    assert (tally.captured, tally.failed, len(service.sent)) == (2, 0, 22)
    assert tally.waiting == ""


def test_a_row_that_fails_again_and_again_is_given_up_and_the_rest_goes_on() -> None:
    def script(body: dict[str, Any], _before: int) -> Answer:
        return problem(502, "capture-failed") if body["capture_id"] == "c1" else CREATED

    service = ScriptedService(script)
    tally = send(service, texts(4))
    assert (tally.captured, tally.failed) == (3, 1)
    assert tally.faults == [Fault(2, "capture-failed: why")]
    assert sum(body["capture_id"] == "c1" for body in service.sent) == 3


def test_what_cannot_mend_is_not_tried_again() -> None:
    service = ScriptedService(lambda _body, _before: problem(422, "invalid-row"))
    assert send(service, texts(2)).failed == 2
    assert len(service.sent) == 2


@pytest.mark.parametrize(("status", "kind"), [(401, "unauthorized"), (422, "no-tokenizer")])
def test_what_every_row_would_suffer_ends_the_run(status: int, kind: str) -> None:
    service = ScriptedService(lambda _body, _before: problem(status, kind))
    tally = send(service, texts(200), concurrency=2)
    assert tally.stopped == f"{kind}: why"
    assert len(service.sent) <= 2 and tally.settled == 0


def test_without_any_progress_the_run_ends_and_says_what_it_waited_for() -> None:
    service = ScriptedService(lambda _body, _before: problem(503, "no-plugin"))
    tally = send(service, texts(5), patience=0.05)
    assert tally.stopped.startswith("nothing was captured for 0.05 s. no-plugin: why")
    assert tally.settled == 0


def test_stopping_ends_the_run_at_once_with_the_rest_untried() -> None:
    started = time.monotonic()
    service = ScriptedService(lambda _body, _before: problem(503, "no-plugin"))
    tally = send(service, texts(50), during=lambda sender: sender.stop("interrupted"))
    assert tally.stopped == "interrupted" and tally.settled == 0
    assert time.monotonic() - started < 30  # and not the 60 s of patience


MESSAGES = [{"role": "user", "content": "hi"}]


def test_without_a_tokenizer_messages_go_to_the_service_as_they_are() -> None:
    service = ScriptedService(lambda _body, _before: CREATED)
    rows = [
        {"messages": MESSAGES, "score": 1},
        {"messages": MESSAGES},
        {"id": "a/b", "messages": MESSAGES, "metadata": {"k": 1}},
        {"messages": [{"role": "user"}]},
        {"messages": MESSAGES, "text": "x"},
    ]
    tally = send(service, rows)
    assert (tally.captured, tally.duplicates, tally.bad_rows) == (2, 1, 2)
    plain, named = sorted(service.sent, key=len)
    assert plain == {"messages": MESSAGES}
    assert named["capture_id"].startswith("a-b-") and named["metadata"] == {"k": 1, "id": "a/b"}


class _TwoIds(ChatTokenizer):
    """Lays out any conversation as two ids."""

    digest = template_digest = "d"  # type: ignore[assignment]
    mask_rule = "rule/1"  # type: ignore[assignment]

    def encode_messages(
        self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None = None
    ) -> tuple[list[int], list[int] | None]:
        if messages[0]["role"] == "odd":
            raise RowError("the chat template refuses these messages")
        return [len(messages), 1], [0, 1]


def test_with_a_tokenizer_messages_go_as_ids_and_mask() -> None:
    service = ScriptedService(lambda _body, _before: CREATED)
    tally = send(
        service, [{"messages": MESSAGES}, {"messages": [{"role": "odd", "content": ""}]}], tokenizer=_TwoIds("x")
    )
    lineage = {"tokenizer": "d", "template": "d", "mask_rule": "rule/1", "max_length": None}
    assert service.sent == [{"input_ids": [1, 1], "loss_mask": [0, 1], "metadata": {"prompt_lineage": lineage}}]
    assert tally.bad_rows == 1


def test_rows_that_the_target_shall_answer_go_to_the_service_whole() -> None:
    service = ScriptedService(lambda _body, _before: CREATED)
    wish = {"max_new_tokens": 5, "temperature": 0.0}
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}], "id": "a/b", "tools": [{"name": "f"}]},
        {"input_ids": [1, 2], "id": "ids"},
        {"input_ids": [1, 2], "id": "ids"},
    ]
    tally = send(service, rows, tokenizer=_TwoIds("x"), layout=Layout(9, True), generate=wish)
    assert (tally.captured, tally.duplicates) == (2, 1)
    chat, ids = sorted(service.sent, key=lambda body: "input_ids" in body)
    assert all(body["generate"] == wish and body["max_length"] == 9 and body["only_last_turn"] for body in (chat, ids))
    assert (chat["messages"], chat["tools"], ids["input_ids"]) == (MESSAGES, [{"name": "f"}], [1, 2])


def test_what_is_too_long_is_left_out_and_no_fault() -> None:
    service = ScriptedService(lambda body, _before: problem(422, "too-long") if "messages" in body else CREATED)
    rows = [{"input_ids": [1] * 9}, {"input_ids": [1]}, {"messages": MESSAGES}]
    tally = send(service, rows, layout=Layout(3))
    assert (tally.captured, tally.too_long, tally.failed, tally.faults, tally.settled) == (1, 2, 0, [], 3)


def test_masks_that_teach_nothing_or_everything_are_counted() -> None:
    rows = [
        {"input_ids": [1, number], "loss_mask": mask} for number, mask in enumerate([[0, 0], [1, 1], [1, 1], [0, 1]])
    ]
    reader = RowReader(read_jsonl([json.dumps(row) for row in [*rows, {"input_ids": [9]}]]), lambda: None, None)
    while reader.next():
        pass
    assert reader.masks == MaskCount(masked=4, without=1, all_zero=1, all_one=2)


def test_the_tokenizer_is_asked_for_once_and_only_if_messages_come() -> None:
    asked: list[int] = []

    def choose() -> ChatTokenizer:
        asked.append(1)
        return _TwoIds("x")

    rows = [{"text": "a"}, {"input_ids": [1]}]
    reader = RowReader(read_jsonl([json.dumps(row) for row in rows]), choose, None)
    assert [reader.next() is not None for _ in range(3)] == [True, True, False]
    assert not asked
    reader = RowReader(read_jsonl([json.dumps({"messages": MESSAGES})] * 3), choose, None)
    while reader.next():
        pass
    assert asked == [1]


def test_a_tokenizer_that_cannot_be_loaded_ends_the_run_with_its_message() -> None:
    class Broken(ChatTokenizer):
        def encode_messages(
            self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None = None
        ) -> tuple[list[int], list[int] | None]:
            raise CaptureError("no chat template")

    with pytest.raises(CaptureError, match="no chat template"):
        send(ScriptedService(lambda _body, _before: CREATED), [{"messages": MESSAGES}] * 3, tokenizer=Broken("x"))


def test_pauses_grow_and_follow_what_the_service_suggests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plain = ServiceError(status=502, kind="capture-failed", title="", detail="")
    assert [2**n / 4 <= _bulk.pause_seconds(plain, n) <= 2**n / 2 for n in (1, 2, 3)] == [True] * 3
    assert _bulk.pause_seconds(plain, 1000) <= 15
    hinted = ServiceError(status=503, kind="spool-full", title="", detail="", retry_after=5)
    assert 2.5 <= _bulk.pause_seconds(hinted, 1) <= 5
