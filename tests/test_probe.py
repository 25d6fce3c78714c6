"""A look at a server takes the rows, leaves nothing in its spool, and says why where there is nothing to see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_dump, make_spec, save_dump
from service.standin import Generate, StandInServer, put_dump, put_failure

from sglang_capture import probe
from sglang_capture.client import EngineError
from sglang_capture.errors import UsageError
from sglang_capture.packing import pack_spool
from sglang_capture.probe import NoProbeError, ProbeError, Prober
from sglang_capture.spool import PROBE_PREFIX, dumps, failures

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInServer]:
    monkeypatch.delenv("SGLANG_CAPTURE_TOKEN", raising=False)
    directory = tmp_path / "spool"
    directory.mkdir(mode=0o700)
    running = StandInServer(directory)
    running.behaviour = right
    yield running
    running.close()


def right(server: StandInServer, request: Generate) -> int:
    """A dump of the ids that were sent."""
    assert request.input_ids is not None
    dump = make_dump(request.spec, request.capture_id, request.tokens)
    save_dump(server.spool, replace(dump, input_ids=torch.tensor(request.input_ids)))
    return 200


def take(server: StandInServer, input_ids: Sequence[int] = PROMPT) -> Any:
    return Prober.connect(server.url, server.spool).take(input_ids, layers=[0, 3], last_hidden="both")


def left(server: StandInServer) -> list[str]:
    return [path.name for path in server.spool.iterdir() if not path.name.startswith(("status", "."))]


def test_a_look_takes_the_rows_and_leaves_nothing(server: StandInServer) -> None:
    dump = take(server)
    assert dump.spec.layers == (0, 3) and dump.spec.last_hidden == "both"
    assert torch.equal(dump.input_ids, torch.tensor(PROMPT))
    expected = make_dump(make_spec(layers=(0, 3), last_hidden="both"), "x", len(PROMPT))
    assert torch.equal(dump.hidden_states, expected.hidden_states)
    assert left(server) == []
    assert server.sent_ids[0].startswith(PROBE_PREFIX)


def refuse(server: StandInServer, request: Generate) -> int:
    put_failure(server.spool, request.capture_id, "spool full: no room", kind="refused", retriable=True)
    return 200


def another_prompt(server: StandInServer, request: Generate) -> int:
    put_dump(server.spool, request.capture_id, request.tokens, request.spec)
    return 200


def no_dump(server: StandInServer, request: Generate) -> int:
    (server.spool / f"{request.capture_id}.pt").write_bytes(b"not a dump")
    return 200


@pytest.mark.parametrize(
    ("behaviour", "error", "message"),
    [
        (refuse, ProbeError, "captured nothing: spool full"),
        (another_prompt, ProbeError, "holds 5 token ids that are not those it was sent"),
        (no_dump, ProbeError, "cannot be read"),
        (lambda *_: 200, ProbeError, r"neither a capture nor a failure appeared.*is this the server's spool\?"),
        (lambda *_: 400, EngineError, "answered 400: no"),
    ],
    ids=["refused", "another prompt", "unreadable", "nothing", "an error"],
)
def test_a_look_that_fails_says_why_and_leaves_nothing(
    server: StandInServer, monkeypatch: pytest.MonkeyPatch, behaviour: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(probe, "_APPEAR_SECONDS", 0.5)
    server.behaviour = behaviour
    with pytest.raises(error, match=message) as raised:
        take(server)
    assert getattr(raised.value, "retriable", None) is (behaviour is refuse)
    assert left(server) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "refused", "problem": "no layer takes the keyword"}, "cannot capture: no layer takes the keyword"),
        ({"time": 0.0}, "has stopped"),
        ({"url": "http://127.0.0.1:9"}, "is the spool of the server at http://127.0.0.1:9, not of"),
        ({"token_required": True}, "set SGLANG_CAPTURE_TOKEN"),
        ({"spec": {"layers": [1]}}, "names no spec"),
    ],
    ids=["refused", "stopped", "another server's", "a secret", "another version"],
)
def test_where_nothing_can_be_seen_it_says_what_to_do(
    server: StandInServer, changes: dict[str, Any], message: str
) -> None:
    server.stop_status()
    server.status_changes = changes
    server.write_status()
    with pytest.raises(NoProbeError, match=message):
        take(server)


def test_the_secret_and_the_key_come_from_the_environment(
    server: StandInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.status_changes = {"token_required": True}
    server.write_status()
    sent: list[dict[str, Any]] = []
    generate = server.generate
    server.generate = lambda body: (sent.append(body), generate(body))[1]  # type: ignore[method-assign]
    monkeypatch.setenv("SGLANG_CAPTURE_TOKEN", "s3cret")
    take(server)
    assert sent[0]["sampling_params"]["custom_params"]["capture_token"] == "s3cret"
    monkeypatch.setenv("SGLANG_CAPTURE_SERVER_API_KEY", "key")
    assert probe.server_api_key() == "key"


def test_a_spool_of_nobody_or_of_another_user_is_named(
    server: StandInServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoProbeError, match=r"there is no spool at .*absent"):
        Prober.connect(server.url, tmp_path / "absent")
    (tmp_path / "fresh").mkdir(mode=0o700)
    with pytest.raises(NoProbeError, match="SGLANG_PLUGINS=sglang_capture"):
        Prober.connect(server.url, tmp_path / "fresh")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(NoProbeError, match=r"cannot be read from here: .* belongs to user"):
        Prober.connect(server.url, server.spool)


def test_an_address_where_nothing_answers_is_named(server: StandInServer) -> None:
    with pytest.raises(EngineError, match="no SGLang server answers"):
        Prober.connect("http://127.0.0.1:1", server.spool)
    with pytest.raises(UsageError, match="an address must look like"):
        Prober.connect("nowhere", server.spool)


def test_probes_are_nobodys_captures(tmp_path: Path) -> None:
    for name in ("mine", f"{PROBE_PREFIX}1"):
        put_dump(tmp_path, name)
        put_failure(tmp_path, name + "-failed", "why")
    assert [path.stem for path in dumps(tmp_path)] == ["mine"]
    assert [path.name for path in failures(tmp_path)] == ["mine-failed.failed.json"]
    assert pack_spool(tmp_path, tmp_path / "dataset").samples == 1


def test_the_probes_of_whoever_was_killed_are_cleared_by_the_next(server: StandInServer) -> None:
    old, new = put_dump(server.spool, f"{PROBE_PREFIX}old"), put_dump(server.spool, f"{PROBE_PREFIX}new")
    os.utime(old, (0, 0))
    Prober.connect(server.url, server.spool)
    assert not old.exists() and new.exists()
