"""Names of models and datasets: what looks like a path is told at once, and the Hub is asked once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sglang_capture.errors import UsageError
from sglang_capture.names import check_place, find, looks_like_path
from sglang_capture.oracle import Oracle
from sglang_capture.prompts import ChatTokenizer, open_source

constants = pytest.importorskip("huggingface_hub.constants")

_OF_ITS_OWN = "/api/agent-harnesses"
"""What huggingface_hub asks once in a process, whatever it is used for."""

_INFO = b'{"id": "org/name", "siblings": []}'


class Hub:
    """Stands in for the Hub: answers each request as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: tuple[int, dict[str, str]] | None = (404, {"X-Error-Code": "RepoNotFound"})
        """Status and headers; ``None`` breaks the connection off."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != _OF_ITS_OWN:
                    hub.asked.append(self.path)
                if hub.answer is None:
                    self.close_connection = True
                    return
                status, headers = hub.answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(_INFO))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(_INFO)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.mark.parametrize(
    "name", ["/nosuch/dir", "./typo", "../typo", "~/typo", ".", "a/b/c", "org/typo/", "models\\typo"]
)
def test_what_looks_like_a_path(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-8B", "org/.hidden"])
def test_what_looks_like_a_name_on_the_hub(name: str) -> None:
    assert not looks_like_path(name)
    check_place(name, "--model")


@pytest.mark.parametrize(
    "use",
    [
        lambda name: find(name, "--model"),
        lambda name: ChatTokenizer(name).load(),
        Oracle.load,
        lambda name: next(open_source(f"hf:{name}").rows()),
    ],
    ids=["find", "tokenizer", "oracle", "dataset"],
)
@pytest.mark.parametrize("name", ["/nosuch/dir", "./typo", "models/of/mine"])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(
    hub: Hub, use: Callable[[str], object], name: str
) -> None:
    with pytest.raises(UsageError, match=f"there is no directory {name}; .* takes a directory, or a name on the Hug"):
        use(name)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda name: ChatTokenizer(name).load(), "model"),
        (Oracle.load, "model"),
        (lambda name: next(open_source(f"hf:{name}").rows()), "dataset"),
    ],
    ids=["tokenizer", "oracle", "dataset"],
)
def test_a_name_that_the_hub_does_not_know_is_asked_for_once(hub: Hub, use: Callable[[str], object], kind: str) -> None:
    with pytest.raises(
        UsageError, match=f"org/typo: there is no such directory, and no {kind} of that name on the Hug"
    ):
        use("org/typo")
    assert hub.asked == [f"/api/{kind}s/org/typo"]


def test_a_hub_that_cannot_be_reached_is_asked_once(hub: Hub) -> None:
    hub.answer = None
    with pytest.raises(UsageError, match=r"--tokenizer org/typo: .* the Hugging Face Hub cannot be asked for a model"):
        ChatTokenizer("org/typo").load()
    assert len(hub.asked) == 1


@pytest.mark.parametrize("answer", [(200, {}), (403, {"X-Error-Code": "GatedRepo"}), (503, {})])
def test_what_the_hub_knows_or_cannot_tell_is_left_to_who_loads_it(
    hub: Hub, answer: tuple[int, dict[str, str]]
) -> None:
    hub.answer = answer
    find("org/name", "--model")
    assert hub.asked == ["/api/models/org/name"]


def test_what_was_downloaded_before_is_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache" / "models--org--name" / "snapshots").mkdir(parents=True)
    find("org/name", "--model")
    assert hub.asked == []


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.touch()
    with pytest.raises(UsageError, match=r"config\.json is a file; DRAFT takes a directory"):
        check_place(str(file), "DRAFT")
