"""The plugin's settings: environment variables with the prefix ``SGLANG_CAPTURE_`` (docs/settings.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from sglang_capture.layers import parse_layers
from sglang_capture.quota import parse_quota
from sglang_capture.spec import LastHidden
from sglang_capture.spool import DEFAULT_DIRECTORY

PREFIX = "SGLANG_CAPTURE_"


class SettingsError(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


class PluginSettings(BaseSettings):
    """What the plugin does inside the server. The names are fixed: people type them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore")

    dir: Path = Field(default=DEFAULT_DIRECTORY, description="the spool: where dumps are written")
    mode: Literal["marked", "all", "off"] = Field(
        default="marked", description="`marked`: only marked requests; `all`: every request's prompt; `off`: nothing"
    )
    layers: str = Field(
        default="",
        description="hidden-state indices that a mark without `capture_layers` gets, like `3,31,59`; "
        "empty: by the model's depth",
    )
    last_hidden: LastHidden = Field(
        default="post", description="the last hidden state: after the final norm, before it, both, or none"
    )
    quota: str = Field(
        default="50%", description="most bytes the spool may hold: a size like `64GiB`, or a share of what is free"
    )
    on_full: Literal["refuse", "wait"] = Field(
        default="refuse",
        description="with a full spool: `refuse` the capture and serve the request, or let the engine `wait`",
    )
    wait_seconds: float = Field(
        default=60,
        gt=0,
        le=240,
        description="with `wait`: how long a forward of the engine waits for room before it refuses",
    )
    nonfinite: Literal["refuse", "label"] = Field(
        default="refuse",
        description="a capture with NaN or Inf in its rows: `refuse` it, or publish it with a `label`",
    )
    token: SecretStr | None = Field(default=None, description="the secret that marks must carry as `capture_token`")
    strict: bool = Field(default=True, description="a server that cannot capture correctly does not start")

    @field_validator("layers")
    @classmethod
    def _readable_layers(cls, value: str) -> str:
        if value:
            parse_layers(value)
        return value

    @field_validator("quota")
    @classmethod
    def _readable_quota(cls, value: str) -> str:
        parse_quota(value, 1 << 40)
        return value

    @property
    def secret(self) -> str | None:
        return self.token.get_secret_value() if self.token else None


def plugin_settings() -> PluginSettings:
    """The settings in the environment.

    Raises:
        SettingsError: names each variable that has an unusable value, what was found and what is expected.
    """
    try:
        return PluginSettings()
    except ValidationError as error:
        raise SettingsError(faults_of(error)) from None


def faults_of(error: ValidationError) -> str:
    """Each variable that has an unusable value, what is expected and what was found."""
    return "; ".join(f"{variable(str(e['loc'][0]))}: {e['msg']} (found {e['input']!r})" for e in error.errors())


def variable(field: str) -> str:
    """The environment variable of a setting's field."""
    return PREFIX + field.upper()
