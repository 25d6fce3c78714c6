"""Truth on demand: captures compared with a second server, and a running server that is tried out."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from factories import save_dump
from typer.testing import CliRunner

from engine.captures import CapturingServer
from sglang_capture import cli
from sglang_capture.commands import _checks
from sglang_capture.probe import Prober
from sglang_capture.selftest import Finding, run_self_test
from sglang_capture.spool import PROBE_PREFIX

pytestmark = pytest.mark.engine


def verify(source: Path, server: CapturingServer) -> tuple[int, dict]:
    """Against a second server, as the command does it."""
    arguments = ["verify", str(source), "--with-server", server.url, "--spool", str(server.spool), "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def self_test(server: CapturingServer) -> dict[str, Finding]:
    """The same prompts in every run: a router that is nearly tied would be no fault, and nothing to be surprised by."""
    prober = Prober.connect(server.url, server.spool)
    return {finding.name: finding for finding in run_self_test(prober, random.Random(1))}


def assert_nothing_is_left(server: CapturingServer) -> None:
    assert [path.name for path in server.spool.glob(f"{PROBE_PREFIX}*")] == []
    assert server.counts().published > 0


def test_captures_in_bfloat16_are_verified_with_a_second_server_in_float32(
    server, bfloat16_server, tmp_path, draw, new_id
):
    names = [new_id() for _ in range(3)]
    for name, length in zip(names, (1, 30, 200), strict=True):
        bfloat16_server.capture(draw(length), {"capture": name})
        save_dump(tmp_path, bfloat16_server.dump(name))
    code, report = verify(tmp_path, server)
    assert (code, report["samples"], report["tokens"], report["first_difference"]) == (0, 3, 231, None), report
    assert (report["dtype"], report["oracle_dtype"]) == ("bfloat16", "float32")
    assert len(report["kinds"]) == 5
    assert 1e-4 < report["worst_error"] < 0.5
    assert_nothing_is_left(server)


def test_a_second_server_shows_where_captures_first_differ(server, tmp_path, draw, new_id):
    name = new_id()
    server.capture(draw(60), {"capture": name, "capture_layers": [1, 3, 4]})
    dump = server.dump(name)
    save_dump(tmp_path, dump)
    assert verify(tmp_path, server)[1]["worst_error"] <= 1e-5
    damaged = dump.hidden_states.clone()
    damaged[40:, 1] = dump.hidden_states[40:, 0]
    damaged[20:, 2] = dump.hidden_states[20:, 0]
    save_dump(tmp_path, replace(dump, hidden_states=damaged))
    code, report = verify(tmp_path, server)
    first = report["first_difference"]
    assert code == 1
    assert (first["name"], first["position"], first["token_id"]) == ("index 3", 40, int(dump.input_ids[40]))
    kinds = {kind["name"]: (kind["rows_off"], kind["looks_like"]) for kind in report["kinds"] if not kind["ok"]}
    assert kinds == {"index 3": (20, ""), "index 4": (40, "index 1")}
    assert_nothing_is_left(server)


def test_a_second_server_of_another_model_is_refused(server, chunking_server, tmp_path, draw, new_id):
    name = new_id()
    server.capture(draw(10), {"capture": name})
    path = save_dump(tmp_path, server.dump(name))
    arguments = ["verify", str(path), "--with-server", chunking_server.url, "--spool", str(chunking_server.spool)]
    message = str(CliRunner().invoke(cli.app, arguments).exception)
    assert "runs another model" in message and "layers 6 and 61" in message and "digest of the weights" in message
    arguments[-1] = str(server.spool)
    assert "is the spool of the server at" in str(CliRunner().invoke(cli.app, arguments).exception)


def test_the_self_test_trusts_a_server_that_computes_the_longest_prompt_in_one_piece(server, monkeypatch):
    monkeypatch.setattr(_checks, "_hooks", lambda: iter(()))  # half a minute, and tested elsewhere
    result = CliRunner().invoke(
        cli.app, ["doctor", "--server", server.url, "--spool", str(server.spool), "--service", "", "--json"]
    )
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    found = {name: check["state"] for name, check in checks.items() if name.startswith("self-test")}
    assert set(found.values()) == {"ok"}, checks
    assert "can be trusted" in checks["self-test, verdict"]["found"]
    assert "fits into one chunk of 4,096" in checks["self-test, chunks"]["found"]
    assert_nothing_is_left(server)


def test_the_self_test_trusts_a_server_that_cuts_prompts(chunking_server):
    found = self_test(chunking_server)
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert found["rows"].found.startswith("64 + 64 + 144 of each state")
    assert "144 tokens in chunks of 64 begin with the rows of their first 64 alone" in found["prefix"].found
    assert "bit for bit" in found["again"].found
    assert_nothing_is_left(chunking_server)


def test_the_self_test_trusts_a_server_in_bfloat16(bfloat16_server):
    found = self_test(bfloat16_server)
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert_nothing_is_left(bfloat16_server)
