"""Starting and stopping: what is in the way is said in one line, and a signal is no failure."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from service.checks import problem, state
from service.running import PATIENCE, serving, until
from service.standin import StandInServer, put_dump
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.service.server import ServiceServer
from sglang_capture.service.settings import ServiceSettings, service_settings
from sglang_capture.spool import SpoolError

COMMAND = [sys.executable, "-c", "import typer; from sglang_capture.commands.serve import serve; typer.run(serve)"]


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CaptureError, match=rf"127.0.0.1:{port} is taken.*--port"):
            ServiceServer(ServiceSettings(port=port, data=tmp_path))


def test_a_foreign_address_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0.*--host"):
        ServiceServer(ServiceSettings(host="192.0.2.1", port=0, data=tmp_path))


def test_a_data_directory_has_one_service(tmp_path: Path, spool_dir: Path) -> None:
    with serving(tmp_path), pytest.raises(CaptureError, match=rf"process {os.getpid()}\) uses the data directory"):
        ServiceServer(ServiceSettings(port=0, data=tmp_path / "data"))
    with serving(tmp_path) as client:
        assert client.get("/health").status_code == 200, "it is free again"


def test_a_data_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"data directory .*file/data cannot be used.*--data"):
        ServiceServer(ServiceSettings(port=0, data=tmp_path / "file" / "data"))


def test_settings_are_read_from_the_environment_and_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CAPTURE_SHARD_SIZE", "64MiB")
    monkeypatch.setenv("SGLANG_CAPTURE_PORT", "1234")
    monkeypatch.setenv("SGLANG_CAPTURE_API_KEY", "")
    settings = service_settings(port=4321, host=None)
    assert (settings.shard_size, settings.port, settings.host, settings.api_key) == (64 << 20, 4321, "127.0.0.1", None)


def test_an_unusable_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CAPTURE_SHARD_SIZE", "big")
    with pytest.raises(UsageError, match=r"SGLANG_CAPTURE_SHARD_SIZE: .*found 'big'"):
        service_settings()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("gpu-1", False),
    ],
)
def test_loopback_is_told_from_other_addresses(host: str, loopback: bool) -> None:
    assert ServiceSettings(host=host).on_loopback is loopback


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_listens_and_stops_on_a_signal(
    tmp_path: Path, spool_dir: Path, with_signal: signal.Signals
) -> None:
    options = ["--port", "0", "--spool", str(spool_dir), "--data", str(tmp_path / "data"), "--json"]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        assert (where["spool"], where["data"]) == (str(spool_dir), str(tmp_path / "data"))
        with httpx.Client(base_url=where["url"], timeout=PATIENCE, trust_env=False) as client:
            assert client.get("/health").json()["data"] == where["data"]
        process.send_signal(with_signal)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_health_answers_while_the_engine_does_not(tmp_path: Path, sglang: StandInServer) -> None:
    """Several at once, as probes and people ask."""
    with serving(tmp_path, server="http://127.0.0.1:9") as client, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.get("/health"), range(8)))
    for answer in answers:
        assert answer.status_code == 200
        health = answer.json()
        assert (health["status"], health["engine"]["reachable"]) == ("degraded", False)
        assert any("no SGLang server answers at http://127.0.0.1:9" in line for line in health["problems"])


def test_a_fault_in_the_background_is_told_and_mended(tmp_path: Path, spool_dir: Path) -> None:
    with serving(tmp_path, catalog=f"sqlite:///{tmp_path}/c.sqlite") as client:
        # The service writes too; whoever comes second waits.
        catalog = create_engine(f"sqlite:///{tmp_path}/c.sqlite", connect_args={"timeout": 60})
        with catalog.begin() as connection:
            connection.execute(text("ALTER TABLE captures RENAME TO hidden"))
        until(lambda: any("stumbled" in line for line in client.get("/health").json()["problems"]), "the fault")
        # A connection of its own: the server ends it after a fault.
        document = problem(httpx.get(f"{client.base_url}/capture", trust_env=False), 500, "internal-error")
        assert "OperationalError" in document["detail"]
        with catalog.begin() as connection:
            connection.execute(text("ALTER TABLE hidden RENAME TO captures"))
        put_dump(spool_dir, "a")
        until(lambda: state(client, "a") == "spooled", "the record")


def test_a_spool_that_others_may_write_is_refused_at_the_start(tmp_path: Path, spool_dir: Path) -> None:
    spool_dir.chmod(0o777)
    with pytest.raises(SpoolError, match="writable by others"):
        ServiceServer(ServiceSettings(port=0, dir=spool_dir, data=tmp_path / "data"))
    spool_dir.chmod(0o700)
    with serving(tmp_path) as client:
        assert client.get("/health").status_code == 200, "nothing was left locked"


def test_an_address_of_the_server_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must look like http://127\.0\.0\.1:30080; found 'foo'"):
        ServiceServer(ServiceSettings(port=0, dir=tmp_path / "spool", data=tmp_path / "data", server="foo"))


def test_a_spool_has_one_service(tmp_path: Path, spool_dir: Path) -> None:
    refusal = rf"another side service \(process {os.getpid()}\) reads"
    with serving(tmp_path), pytest.raises(SpoolError, match=refusal):
        ServiceServer(ServiceSettings(port=0, dir=spool_dir, data=tmp_path / "other"))
    with serving(tmp_path, data=tmp_path / "other") as client:
        assert client.get("/health").status_code == 200, "it is free again"


def test_a_spool_that_comes_later_has_one_service_too(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        until(lambda: any("no spool" in line for line in first.get("/health").json()["problems"]), "the want of one")
        (tmp_path / "spool").mkdir(mode=0o700)
        put_dump(tmp_path / "spool", "a")
        until(lambda: state(first, "a") == "spooled", "the record")
        with pytest.raises(SpoolError, match="another side service"):
            ServiceServer(ServiceSettings(port=0, dir=tmp_path / "spool", data=tmp_path / "other"))
