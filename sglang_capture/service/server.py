"""Running the service: the address taken first, so that a taken one is a clear error and not a traceback."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import uvicorn

from sglang_capture.client._http import check_address
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.service.app import create_app
from sglang_capture.service.core import Service
from sglang_capture.service.settings import ServiceSettings
from sglang_capture.settings import variable

_STOP_SECONDS = 10
"""How long open answers (event streams, big downloads) may take when the service stops."""


class ServiceServer:
    """A service with its socket bound: :attr:`url` is known before it runs.

    Raises:
        CaptureError: the address is taken, or the data directory cannot be used.
        SpoolError: the spool cannot be trusted, or another service reads there.
        UsageError: the address is none of this machine, or SGLang's is no address.
    """

    def __init__(self, settings: ServiceSettings):
        self.settings = settings
        if settings.server is not None:
            check_address(settings.server)
        self._socket = _bind(settings.host, settings.port)
        try:
            self.service = Service(settings)
            self._spool = self.service.indexer.claim
            self._claim_spool(settings.dir)
        except BaseException:
            self._socket.close()
            raise
        config = uvicorn.Config(create_app(self.service), log_level="warning", timeout_graceful_shutdown=_STOP_SECONDS)
        self._server = uvicorn.Server(config)

    def _claim_spool(self, directory: Path) -> None:
        """A spool that is there must be one that can be read; one that is not, the server will make."""
        if not (directory.exists() or directory.is_symlink()):
            return
        try:
            self._spool.hold()
        except BaseException:
            self.service.close()
            raise

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until a signal or :meth:`stop`.

        Raises:
            CaptureError: the service could not start; the log says why.
        """
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.service.close()
            self._spool.close()
        if not self._server.started:
            raise CaptureError("the service could not start; the log above says why")

    def stop(self) -> None:
        """Have :meth:`run` return; may be called from any thread."""
        self._server.should_exit = True

    @property
    def started(self) -> bool:
        return self._server.started


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CaptureError(
                f"{host}:{port} is taken: is a service running already? Stop it, or choose another port with --port or "
                f"{variable('port')}"
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error}; set --host or {variable('host')}") from error
