"""A process that has imported SGLang once, and forks the tests' servers: importing takes a server half a minute.

What is forked is a process that has imported modules and done nothing else; from there on it does what
``python -m sglang_capture_patches.cpu`` does: the same arguments and environment, and plugins loaded in each process.
The server's own children, which SGLang would spawn as fresh interpreters, are forked from a copy of that clean process
(the standard library's forkserver), with the environment that their parent has by then.

SGLang reads some of its variables while it is imported. A server that sets such a one is started the plain way, and so
are the servers of the tests that are about starting.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver, spawn, util
from pathlib import Path
from typing import Any, NoReturn

import psutil

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang_capture_patches.cpu",
)


def outer_environment() -> dict[str, str]:
    """The tests' own environment without what is meant for SGLang; an older SGLang in front, if one is to be tested."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    if "SGLANG_UNDER_TEST" in os.environ:
        paths = [os.environ["SGLANG_UNDER_TEST"], *filter(None, [kept.get("PYTHONPATH")])]
        kept["PYTHONPATH"] = os.pathsep.join(paths)
    return kept


class Nursery:
    """The forking process; ends with the process that made it."""

    def __init__(self) -> None:
        from sglang_capture_patches.cpu import environment_of

        directory = Path(tempfile.mkdtemp(prefix="nursery-"))
        self._address = str(directory / "socket")
        environment = environment_of([], {**outer_environment(), "SGLANG_PLUGINS": "none"})
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                env=environment,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
            )

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> psutil.Process:
        """Start a server; it leads a process group of its own."""
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(self._address)
            order = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
            connected.sendall(json.dumps(order).encode() + b"\n")
            return psutil.Process(int(connected.makefile().readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> NoReturn:
    """Import, then fork a server for each order, until the tests' process is gone."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        with listener.accept()[0] as connected:
            order = json.loads(connected.makefile().readline())
            pid = os.fork()
            if pid == 0:
                listener.close()
                connected.close()
                _become(order)
            connected.sendall(f"{pid}\n".encode())


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(order: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["sglang.launch_server", *order["arguments"]]
    code = 1
    try:
        _fork_children_from_here()
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _fork_children_from_here() -> None:
    """Set a copy of this clean process aside, and have multiprocessing fork children from it instead of spawning."""
    address = connection.arbitrary_address("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    alive_read, alive_write = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(alive_write)
        # A scheduler that fails tells its parent so with this signal, and means the server.
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(server, signal.SIGQUIT))
        _prepare_with_environment()
        # For children of children, who have this process's address, but are no parents of it.
        forkserver._forkserver.ensure_running = lambda: None
        forkserver.main(listener.detach(), alive_read, [])
        os._exit(0)
    listener.close()
    os.close(alive_read)
    known = forkserver._forkserver
    known._forkserver_address, known._forkserver_alive_fd, known._forkserver_pid = address, alive_write, pid
    _prepare_with_environment()
    spawn.set_start_method("forkserver", force=True)


def _prepare_with_environment() -> None:
    """Children get the environment that their parent has when it starts them, as spawned ones do."""
    get, prepare = spawn.get_preparation_data, spawn.prepare

    def get_more(name: str) -> dict[str, Any]:
        return {**get(name), "environment": dict(os.environ)}

    def prepare_more(data: dict[str, Any]) -> None:
        os.environ.update(data.pop("environment"))
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        util._close_stdin()
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = get_more, prepare_more
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang asks for spawn


if __name__ == "__main__":
    main()
