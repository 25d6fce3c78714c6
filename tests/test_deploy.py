"""The files in deploy/: well-formed, every name in them real, and server and service agree on spool and user."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import DEPLOY, ROOT, VARIABLES, check_command, unknown_variables
from pydantic import ByteSize, TypeAdapter
from sglang_capture_patches import contract

from sglang_capture.service.settings import ServiceSettings
from sglang_capture.settings import PluginSettings, variable

UNITS = {name: DEPLOY / "systemd" / f"{name}.service" for name in ("sglang", "sglang-capture")}
ENVIRONMENT = DEPLOY / "systemd/sglang-capture.env"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def directives(unit: Path) -> dict[str, list[str]]:
    """All values of each directive of a unit; systemd lets one be given several times."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def assignments(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The compose file, its variables replaced by their defaults."""
    text = re.sub(r"\$\{\w+(?::[-?]([^}]*))?\}", lambda match: match[1] or "", (DEPLOY / "compose.yaml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_every_variable_is_one_that_is_read(file: Path) -> None:
    assert unknown_variables(file.read_text()) == set()


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_units_have_the_three_sections_and_are_in_order(unit: Path) -> None:
    assert re.findall(r"^\[(\w+)\]$", unit.read_text(), re.MULTILINE) == ["Unit", "Service", "Install"]
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        assert re.fullmatch(r"|#.*|\[\w+\]|[A-Z][A-Za-z]+=\S.*", line), line


def test_units_run_as_one_user_with_one_environment_that_stays() -> None:
    server, service = (directives(unit) for unit in UNITS.values())
    assert server["User"] == service["User"]
    assert server["EnvironmentFile"] == service["EnvironmentFile"]
    for unit in (server, service):
        assert not {"DynamicUser", "RemoveIPC", "PrivateIPC", "PrivateUsers", "MemoryMax"} & unit.keys()
    assert "SGLANG_PLUGINS=sglang_capture" in server["Environment"]
    assert service["After"] == service["Wants"] == ["sglang.service"]


def test_the_environment_of_the_units_is_accepted_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    found = assignments(ENVIRONMENT.read_text().splitlines()) | assignments(
        directives(UNITS["sglang-capture"])["Environment"]
    )
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert PluginSettings().dir == ServiceSettings().dir == Path(found["SGLANG_CAPTURE_DIR"])
    assert (
        str(ServiceSettings().data) == f"/var/lib/{directives(UNITS['sglang-capture'])['StateDirectory'][0].split()[0]}"
    )


def test_units_start_the_server_and_the_service() -> None:
    server, service = (shlex.split(directives(unit)["ExecStart"][0]) for unit in UNITS.values())
    assert server[1:3] == ["-m", "sglang.launch_server"]
    assert Path(service[0]).name == "sglang-capture"
    assert Path(service[0]).parent == Path(server[0]).parent
    check_command(service[1:])


def test_containers_run_as_one_user_and_see_one_spool_of_a_given_size(compose: dict[str, Any]) -> None:
    server, service = (compose["services"][name] for name in ("sglang", "capture"))
    assert server["user"] == service["user"]
    assert server["image"] == service["image"]
    spool = Path(server["environment"]["SGLANG_CAPTURE_DIR"])
    assert spool == Path(service["environment"]["SGLANG_CAPTURE_DIR"])
    for container in (server, service):
        mounts = dict(volume.rsplit(":", 1)[::-1] for volume in container["volumes"])
        assert mounts[str(spool.parent)] == "spool"
    options = compose["volumes"]["spool"]["driver_opts"]
    assert options["type"] == "tmpfs"
    size = re.search(r"size=(\w+)", options["o"])
    assert size is not None
    assert bytes_of(size[1] + "ib") >= 1 << 34
    assert bytes_of(server["shm_size"]) >= 1 << 33


def bytes_of(size: str) -> int:
    return TypeAdapter(ByteSize).validate_python(size)


def test_the_environment_of_the_containers_is_accepted(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, settings in (("sglang", PluginSettings), ("capture", ServiceSettings)):
        given = {key: value for key, value in compose["services"][name]["environment"].items() if key in VARIABLES}
        with monkeypatch.context() as patch:
            for key, value in given.items():
                patch.setenv(key, value or "")
            settings()
        assert given.keys() <= {variable(field) for field in settings.model_fields}, name
    assert compose["services"]["sglang"]["environment"]["SGLANG_PLUGINS"] == "sglang_capture"


def test_containers_run_what_there_is_and_are_watched(compose: dict[str, Any]) -> None:
    server, service = (compose["services"][name] for name in ("sglang", "capture"))
    assert server["command"][:3] == ["python3", "-m", "sglang.launch_server"]
    assert service["command"][0] == "sglang-capture"
    check_command(service["command"][1:])
    for container in (server, service):
        port = container["ports"][0].rsplit(":", 1)[1]
        assert any(f":{port}/health" in word for word in container["healthcheck"]["test"])
    assert str(ServiceSettings.model_fields["port"].default) in service["ports"][0]


def test_nothing_is_published_beyond_the_machine_and_the_service_wants_a_key(compose: dict[str, Any]) -> None:
    for container in compose["services"].values():
        assert [port for port in container["ports"] if not port.startswith("127.0.0.1:")] == []
    assert "${SGLANG_CAPTURE_API_KEY:?" in (DEPLOY / "compose.yaml").read_text()


def test_the_image_is_the_newest_tested_and_gets_what_the_package_is_built_from(compose: dict[str, Any]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    image = f"lmsysorg/sglang:v{contract.NEWEST_TESTED}"
    assert f"ARG SGLANG_IMAGE={image}\n" in dockerfile
    assert compose["services"]["sglang"]["build"]["args"] == {"SGLANG_IMAGE": image}
    assert compose["services"]["sglang"]["build"]["dockerfile"] == "deploy/Dockerfile"
    copied = {word for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "sglang_capture", "patches"}
    assert [name for name in copied if not (ROOT / name).exists()] == []
