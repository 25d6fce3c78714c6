"""A stand-in for an SGLang server with the plugin, for the service's own tests: no engine, no model.

It answers ``/generate`` by writing what the plugin would write into a spool, and nothing else. What a real server does
is tested in ``tests/engine``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from factories import make_dump, make_spec, save_dump

from sglang_capture import spool
from sglang_capture.spec import CaptureSpec
from sglang_capture.spool import Failure, SpoolStatus

SPEC = make_spec()


@dataclass(frozen=True)
class Generate:
    """One request as the stand-in got it."""

    capture_id: str
    input_ids: list[int] | None
    text: str | None
    spec: CaptureSpec
    request_id: str | None

    @property
    def tokens(self) -> int:
        return len(self.input_ids) if self.input_ids is not None else len((self.text or "").split())


Write = Callable[[list[int]], dict[str, Any]]
"""What to write behind ids when nothing is to be captured: the answer of ``/generate``."""


def written(ids: list[int], reason: str = "stop") -> dict[str, Any]:
    """The answer of ``/generate`` as SGLang gives it; one that came to its end has the end's id as its last."""
    finish = {"type": "stop", "matched": ids[-1]} if reason == "stop" else {"type": reason, "length": len(ids)}
    return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": finish}}


Behaviour = Callable[["StandInServer", Generate], int]
"""What to do with a request; returns the HTTP status of the answer."""


def publish(server: StandInServer, request: Generate) -> int:
    """What a healthy server does: the dump is there before the answer."""
    put_dump(server.spool, **dump_of(request))
    return 200


def dump_of(request: Generate) -> dict[str, Any]:
    """What :func:`put_dump` is to be told for a request."""
    return {
        "capture_id": request.capture_id,
        "tokens": request.tokens,
        "spec": request.spec,
        "input_ids": request.input_ids,
        "request_id": request.request_id,
    }


def put_dump(
    directory: Path,
    capture_id: str,
    tokens: int = 5,
    spec: CaptureSpec = SPEC,
    *,
    input_ids: list[int] | None = None,
    request_id: str | None = None,
) -> Path:
    """Publish a dump as the plugin does: under another name first, then all at once; the first one stands."""
    parts = directory.parent / "parts"
    parts.mkdir(exist_ok=True)
    dump = make_dump(spec, capture_id, tokens if input_ids is None else len(input_ids))
    changes = {"input_ids": None if input_ids is None else torch.tensor(input_ids), "request_id": request_id}
    part = save_dump(parts, replace(dump, **{name: value for name, value in changes.items() if value is not None}))
    final = spool.dump_path(directory, capture_id)
    try:
        os.link(part, final)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    return final


def put_failure(
    directory: Path,
    capture_id: str,
    reason: str,
    *,
    kind: Any = "failed",
    retriable: bool = False,
    request_id: str = "",
) -> None:
    failure = Failure(
        capture_id=capture_id, request_id=request_id, kind=kind, reason=reason, retriable=retriable, time=time.time()
    )
    spool.write_failure(directory, failure)


class StandInServer:
    """Listens on a free port, and writes a status twice as often as the service reads it."""

    def __init__(self, directory: Path, quota: int = 1 << 30):
        self.spool = directory
        self.quota = quota
        self.free: int | None = None
        self.longest_prompt: int | None = None
        self.status_changes: dict[str, Any] = {}
        self.behaviour: Behaviour = publish
        self.requests: list[Generate] = []
        self.write: Write = lambda ids: written([ids[-1] + 1, 1])
        self.prompts: list[tuple[list[int], dict[str, Any]]] = []
        """What answers were written to, each with its sampling parameters."""
        self._lock = threading.Lock()
        self._status_lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True),
            threading.Thread(target=self._keep_status, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def sent_ids(self) -> list[str]:
        with self._lock:
            return [request.capture_id for request in self.requests]

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.spool.glob("*.pt"))

    def write_status(self) -> None:
        with self._status_lock:  # the keeper's, computed before a change, must not come behind the change's own
            spool.write_atomically(self.spool / spool.STATUS_NAME, self._status().model_dump_json().encode())

    def _status(self) -> SpoolStatus:
        used = self.used()
        fields: dict[str, Any] = {
            "state": "capturing",
            "pid": os.getpid(),
            "rank": "dp0-pp0-tp0",
            "writer": True,
            "mode": "marked",
            "url": self.url,
            "spec": json.loads(SPEC.to_json()),
            "quota_bytes": self.quota,
            "used_bytes": used,
            "free_bytes": max(0, self.quota - used) if self.free is None else self.free,
            "on_full": "refuse",
            "started": 0.0,
            "time": time.time(),
            **self.status_changes,
        }
        return SpoolStatus(**fields)

    def generate(self, body: dict[str, Any]) -> int:
        mark = body["sampling_params"]["custom_params"]
        changes = {"layers": mark.get("capture_layers"), "last_hidden": mark.get("capture_last_hidden")}
        spec = make_spec(**{name: value for name, value in changes.items() if value is not None})
        request = Generate(mark["capture"], body.get("input_ids"), body.get("text"), spec, body.get("rid"))
        with self._lock:
            self.requests.append(request)
        return self.behaviour(self, request)

    def go_on(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.prompts.append((body["input_ids"], body["sampling_params"]))
        return self.write(body["input_ids"])

    def stop_status(self) -> None:
        """As when the server dies: the status grows old."""
        self._stopped.set()
        self._threads[1].join()

    def close(self) -> None:
        self.stop_status()
        self._http.shutdown()
        self._http.server_close()

    def _keep_status(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # the spool is away for a while, in some tests
                self.write_status()
            self._stopped.wait(0.2)


def _handler(server: StandInServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            port = server._http.server_address[1]
            info = {"model_path": "m", "tokenizer_path": "m", "version": "0.5.23", "port": port}
            self._answer(200, {**info, "max_req_input_len": server.longest_prompt})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "custom_params" not in body["sampling_params"]:
                self._answer(200, server.go_on(body))
                return
            status = server.generate(body)
            self._answer(status, {"text": "", "meta_info": {}} if status == 200 else {"error": {"message": "no"}})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: object) -> None:
            """Quiet."""

    return Handler
