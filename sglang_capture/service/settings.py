"""The service's settings: environment variables with the prefix ``SGLANG_CAPTURE_`` (docs/service.md)."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from sglang_capture.catalog import sqlite_url
from sglang_capture.errors import UsageError
from sglang_capture.settings import PREFIX, faults_of
from sglang_capture.spool import DEFAULT_DIRECTORY

DEFAULT_PORT = 30080
DEFAULT_SERVER = "http://127.0.0.1:30000"


class ServiceSettings(BaseSettings):
    """What the side service does, and where."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore")

    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="the port to listen on; 0 takes a free one")
    api_key: SecretStr | None = Field(
        default=None, description="if set, every route but `/health` wants it as `Authorization: Bearer`"
    )
    dir: Path = Field(default=DEFAULT_DIRECTORY, description="the spool, the same as the server's")
    data: Path = Field(default=Path("captures"), description="where catalog, datasets, jobs and exports are kept")
    catalog: str | None = Field(
        default=None, description="the catalog as a SQLAlchemy URL; unset: `catalog.sqlite` in the data directory"
    )
    server: str | None = Field(
        default=None,
        description="SGLang's URL; unset: the one the plugin's status names, else `http://127.0.0.1:30000`",
    )
    server_api_key: SecretStr | None = Field(default=None, description="the key that SGLang's `--api-key` asks for")
    token: SecretStr | None = Field(default=None, description="the secret that the server wants in marks")
    tokenizer: str | None = Field(
        default=None, description="lays out `messages`; unset: the tokenizer of the server's model"
    )
    trust_remote_code: bool = Field(default=False, description="let the tokenizer bring its own code (Kimi's needs it)")
    shard_size: ByteSize = Field(
        default=ByteSize(1 << 30), gt=0, description="pack when so much waits; also most that one shard holds"
    )
    pack_count: int = Field(
        default=4096, ge=1, le=16384, description="pack when so many captures wait; also most that one shard holds"
    )
    pack_age: float = Field(default=60, ge=0, description="pack when a capture has waited so many seconds")
    hold_seconds: float = Field(
        default=120, gt=0, description="how long a request is held back while the spool has no room for its capture"
    )
    appear_seconds: float = Field(
        default=30, gt=0, description="how long after the engine's answer a capture may take to appear in the spool"
    )

    @property
    def catalog_url(self) -> str:
        return self.catalog or sqlite_url(self.data / "catalog.sqlite")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the service, so that a client may name any file of it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def service_settings(**given: object) -> ServiceSettings:
    """The settings in the environment, where nothing else is ``given`` (``None`` means not given).

    Raises:
        UsageError: names each variable that has an unusable value, what was found and what is expected.
    """
    try:
        settings = ServiceSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        # Records name files; a relative path would mean another place to whoever reads them.
        return settings.model_copy(update={"data": settings.data.absolute()})
    except ValidationError as error:
        raise UsageError(faults_of(error)) from None
