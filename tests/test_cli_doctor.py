"""`sglang-capture doctor`: each finding says how things stand, and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from causal_model import CausalModel
from factories import save_dump
from service.standin import SPEC, Generate, StandInServer, put_dump
from typer.testing import CliRunner

from sglang_capture import cli, spool
from sglang_capture.commands import _checks
from sglang_capture.commands._checks import Check
from sglang_capture.spool import SpoolStatus
from sglang_capture.tiny_model import make_tiny_model

REPORT = {"ok": True, "sglang": "0.5.23", "problems": [], "hooks": ["a", "b"]}


@pytest.fixture(autouse=True)
def _no_sglang_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is hooked is asked for in another process, which takes half a minute; here it answers at once."""
    hooks_say(monkeypatch, json.dumps(REPORT))


def hooks_say(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> None:
    run = subprocess.run

    def answer(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if _checks._HOOKS_MODULE not in command:
            return run(command, **options)
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(_checks.subprocess, "run", answer)
    monkeypatch.setattr(_checks, "_version", lambda _package: "1.2.3")


def doctor(directory: Path, *arguments: str) -> tuple[int, dict[str, Check]]:
    result = CliRunner().invoke(cli.app, ["doctor", "--spool", str(directory), *arguments, "--json"])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    answer = json.loads(result.stdout)
    assert answer["ok"] is (result.exit_code == 0)
    return result.exit_code, {check["name"]: Check(**check) for check in answer["checks"]}


def status(directory: Path, **changes: Any) -> Path:
    directory.mkdir(mode=0o700)
    fields: dict[str, Any] = {
        "state": "capturing",
        "pid": os.getpid(),
        "rank": "dp0-pp0-tp0",
        "writer": True,
        "mode": "marked",
        "model_path": "/models/kimi",
        "quota_bytes": 1 << 30,
        "used_bytes": 0,
        "free_bytes": 1 << 30,
        "on_full": "refuse",
        "started": 0.0,
        "time": time.time() + 3600,  # fresh for as long as the test may take
        **changes,
    }
    (directory / spool.STATUS_NAME).write_text(SpoolStatus(**fields).model_dump_json())
    return directory


def test_before_anything_runs_nothing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    code, checks = doctor(tmp_path / "spool")
    assert code == 0
    assert {checks[name].state for name in ("python", "torch", "plugin", "hooks", "SGLANG_PLUGINS", "room")} == {"ok"}
    for name in ("spool", "server's plugin", "server", "side service"):
        assert checks[name].state == "warn", checks[name]


def test_the_plugin_is_found_where_the_package_is_installed(tmp_path: Path) -> None:
    _, checks = doctor(tmp_path / "spool")
    assert "sglang_capture_patches:register" in checks["plugin"].found


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("sglang_capture", "ok"),
        ("other, sglang_capture", "ok"),
        ("", "ok"),
        ("other", "wrong"),
        ("sglang_capture_cpu", "wrong"),
    ],
)
def test_the_variable_must_admit_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, state: str
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    code, checks = doctor(tmp_path / "spool")
    assert checks["SGLANG_PLUGINS"].state == state
    assert code == (1 if state == "wrong" else 0)


@pytest.mark.parametrize(
    ("stdout", "stderr", "state", "found"),
    [
        ("noise\n" + json.dumps(REPORT), "", "ok", "2 places"),
        (json.dumps({**REPORT, "ok": False, "problems": ["a.b is missing"]}), "", "wrong", "a.b is missing"),
        ("", "Traceback\nModuleNotFoundError: No module named 'x'", "wrong", "No module named 'x'"),
        ("", "", "wrong", "no message"),
    ],
    ids=["good", "problem", "broken", "silent"],
)
def test_what_would_be_hooked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, state: str, found: str
) -> None:
    hooks_say(monkeypatch, stdout, stderr)
    check = doctor(tmp_path / "spool")[1]["hooks"]
    assert check.state == state and found in check.found


def test_without_sglang_and_transformers_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checks, "_version", lambda _package: None)
    code, checks = doctor(tmp_path / "spool")
    assert code == 0 and "hooks" not in checks
    assert "sglang-capture[sglang]" in checks["sglang"].advice
    assert "sglang-capture[transformers]" in checks["transformers"].advice


@pytest.mark.parametrize(
    ("changes", "state", "found"),
    [
        ({}, "ok", "capturing from /models/kimi"),
        ({"time": 0.0}, "warn", "last wrote its status"),
        ({"state": "refused", "problem": "no layer takes the keyword"}, "wrong", "no layer takes the keyword"),
    ],
    ids=["capturing", "stale", "refused"],
)
def test_what_the_plugin_of_the_server_says_is_shown(
    tmp_path: Path, changes: dict[str, Any], state: str, found: str
) -> None:
    check = doctor(status(tmp_path / "spool", **changes))[1]["server's plugin"]
    assert check.state == state and found in check.found


def test_the_last_error_of_the_plugin_is_shown(tmp_path: Path) -> None:
    assert doctor(status(tmp_path / "spool", last_error="disk on fire"))[1]["last error"].found == "disk on fire"


def test_a_spool_that_cannot_be_trusted_is_wrong(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    directory.mkdir()
    directory.chmod(0o777)
    code, checks = doctor(directory)
    assert code == 1 and "chmod 700" in checks["spool"].found
    link = tmp_path / "link"
    link.symlink_to(directory)
    assert doctor(link)[1]["spool"].state == "wrong"


def test_a_setting_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CAPTURE_QUOTA", "much")
    code, checks = doctor(tmp_path / "spool")
    assert code == 1 and "SGLANG_CAPTURE_QUOTA" in checks["settings"].found


@pytest.mark.parametrize("option", ["--server", "--service"])
@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "no address"])
def test_an_address_that_is_named_must_answer(tmp_path: Path, option: str, address: str) -> None:
    code, checks = doctor(tmp_path / "spool", option, address)
    check = checks["server" if option == "--server" else "side service"]
    assert code == 1 and check.state == "wrong" and address in check.found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInServer]:
    """Rows as they should be; a server's own are in engine/test_truth.py."""
    monkeypatch.delenv("SGLANG_CAPTURE_TOKEN", raising=False)
    (tmp_path / "spool").mkdir(mode=0o700)
    running = StandInServer(tmp_path / "spool")
    model = CausalModel(SPEC)

    def right(_: StandInServer, request: Generate) -> int:
        assert request.input_ids is not None
        save_dump(running.spool, model.dump(request.spec, request.input_ids, request.capture_id))
        return 200

    running.behaviour = right
    yield running
    running.close()


def self_test(server: StandInServer, *arguments: str) -> tuple[int, dict[str, Check]]:
    code, checks = doctor(server.spool, "--server", server.url, *arguments)
    return code, {name: check for name, check in checks.items() if name.startswith("self-test")}


def test_a_server_that_is_named_is_tried_out(server: StandInServer) -> None:
    code, checks = self_test(server)
    assert code == 0
    assert {name.removeprefix("self-test, "): check.state for name, check in checks.items()} == {
        "rows": "ok",
        "tokens": "ok",
        "again": "ok",
        "prefix": "ok",
        "chunks": "warn",  # the stand-in does not say how it cuts
        "norm": "ok",
        "verdict": "warn",
    }
    assert list(server.spool.glob("*.pt")) == []


def test_a_server_that_captures_wrongly_is_wrong(server: StandInServer) -> None:
    def other_ids(server: StandInServer, request: Generate) -> int:
        put_dump(server.spool, request.capture_id, request.tokens, request.spec)
        return 200

    server.behaviour = other_ids
    code, checks = self_test(server)
    assert code == 1 and "are not those it was sent" in checks["self-test, capture"].found
    assert checks["self-test, verdict"].state == "wrong"


def test_only_a_server_that_is_named_is_tried_out_and_not_where_one_only_looks(server: StandInServer) -> None:
    server.write_status()
    for arguments in ((), ("--server", server.url, "--no-self-test")):
        checks = doctor(server.spool, *arguments)[1]
        assert checks["server"].state == "ok" and not any(name.startswith("self-test") for name in checks)
    assert server.requests == []


def test_a_server_of_another_user_cannot_be_tried_out_from_here(
    server: StandInServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stop_status()
    (server.spool / spool.STATUS_NAME).unlink(missing_ok=True)  # another user cannot read it
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    code, checks = doctor(server.spool, "--server", server.url)
    assert code == 1
    assert "not run" in checks["self-test"].found and "server's user" in checks["self-test"].found
    assert {checks[name].state for name in ("spool", "server's plugin")} == {"warn"}
    assert doctor(server.spool, "--server", server.url, "--no-self-test")[0] == 0
    assert doctor(server.spool)[0] == 1  # but a server that I start would not get this spool


def test_without_the_servers_secret_nobody_can_say_that_it_is_right(server: StandInServer) -> None:
    server.status_changes = {"token_required": True}
    server.write_status()
    code, checks = self_test(server)
    assert code == 1 and "SGLANG_CAPTURE_TOKEN" in checks["self-test"].found


def test_a_model_is_described(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", layers=8, hidden=32)
    found = doctor(tmp_path / "spool", "--model", str(tmp_path / "model"))[1]["model"].found
    assert "DeepseekV3ForCausalLM, 8 layers of hidden size 32" in found and "3, 5, 6" in found
    assert doctor(tmp_path / "spool", "--model", str(tmp_path))[0] == 1


def test_a_model_that_was_not_compared_is_told_from_one_that_was(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", layers=8, hidden=32)
    assert doctor(tmp_path / "spool", "--model", str(tmp_path / "model"))[1]["model"].state == "ok"
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("DeepseekV3ForCausalLM", "NanbeigeForCausalLM"))
    code, checks = doctor(tmp_path / "spool", "--model", str(tmp_path / "model"))
    assert (code, checks["model"].state) == (0, "warn")
    assert "docs/models.md" in checks["model"].advice


def test_for_people_each_finding_is_one_marked_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    result = CliRunner().invoke(cli.app, ["doctor", "--spool", str(tmp_path / "spool")])
    lines = result.stdout.splitlines()
    assert all(line[0] in "✓!✗" for line in lines)
    (wrong,) = [line for line in lines if line.startswith("✗")]
    assert wrong.startswith("✗ SGLANG_PLUGINS: other in this shell. A server started from this shell would not load")
