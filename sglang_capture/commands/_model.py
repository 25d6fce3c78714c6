"""What a model's ``config.json`` says of its shape, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.layers import canonical_layers, check_layers, default_layers, parse_layers
from sglang_capture.names import find, first_line
from sglang_capture.spec import DTYPES, LAST_HIDDEN_CHOICES, CaptureSpec, LastHidden

_WEIGHTS = ("*.safetensors", "*.bin")
"""The files that transformers loads weights from."""


def read_spec(model: str, layers: str | None, last_hidden: str | None) -> CaptureSpec:
    """The spec that captures of ``model`` would have; what is not given is as a server has it by default.

    Raises:
        UsageError: there is no config, or it lacks a number that is needed.
        LayerError: the model does not have these layers.
    """
    config = read_config(model)
    shape = _language_model(config)
    try:
        count = int(shape["num_hidden_layers"])
        return CaptureSpec(
            layers=chosen_layers(layers, count) or default_layers(count),
            last_hidden=chosen_last_hidden(last_hidden) or "post",
            hidden_size=shape["hidden_size"],
            num_layers=count,
            vocab_size=shape["vocab_size"],
            dtype=_dtype(shape, config),
            architecture=next(iter(config.get("architectures") or ["unknown"])),
            model_path=model,
        )
    except KeyError as error:
        raise UsageError(f"the config of {model} says nothing of {error}: is it a language model?") from None


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model that also sees or hears keeps its language model's shape a level down or two."""
    for name in ("thinker_config", "llm_config", "language_config", "text_config"):
        if isinstance(config.get(name), Mapping):
            return _language_model(config[name])
    return config


def chosen_layers(text: str | None, count: int) -> tuple[int, ...] | None:
    """The layers that ``--layers`` names, checked against a model of ``count`` layers; ``None`` if it is not given.

    Raises:
        LayerError: malformed, or the model does not have them.
    """
    if text is None:
        return None
    layers = canonical_layers(parse_layers(text))
    check_layers(layers, count)
    return layers


def chosen_last_hidden(text: str | None) -> LastHidden | None:
    """What ``--last-hidden`` names; ``None`` if it is not given.

    Raises:
        UsageError: it is no kind of last hidden state.
    """
    if text is None or text in LAST_HIDDEN_CHOICES:
        return text  # type: ignore[return-value]
    raise UsageError(f"--last-hidden must be one of {', '.join(LAST_HIDDEN_CHOICES)}; found {text!r}")


def read_config(model: str, option: str = "--model") -> dict[str, Any]:
    """``config.json`` of a directory, or of a model on the Hugging Face Hub; ``option`` is what it was named for.

    Raises:
        UsageError: there is none.
    """
    find(model, option)
    file = Path(model) / "config.json"
    if not file.is_file():
        file = _from_hub(model)
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} is no model's config: a JSON object is expected")
    return config


def read_vocab_size(model: str) -> int | None:
    """How many token ids a model has rows for; ``None`` where no config says so, as beside a tokenizer alone."""
    try:
        config = read_config(model)
    except UsageError:
        return None
    sizes = (source.get("vocab_size") for source in (_language_model(config), config))
    return next((size for size in sizes if isinstance(size, int)), None)


def check_loadable(model: str, option: str) -> None:
    """Whether transformers could begin to load a model: it is installed, and there are a config and weights.

    Raises:
        UsageError: there is no such model.
        CaptureError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise CaptureError(f"{option} needs transformers: pip install 'sglang-capture[transformers]'")
    config = read_config(model, option)
    if not (config.get("model_type") or config.get("architectures")):
        raise UsageError(
            f"the config of {model} names no model_type; {option} takes a model that transformers can load"
        )
    directory = Path(model)
    if directory.is_dir() and not any(any(directory.glob(pattern)) for pattern in _WEIGHTS):
        raise UsageError(f"{model} holds no weights ({', '.join(_WEIGHTS)}); {option} takes the directory of a model")


def _from_hub(model: str) -> Path:
    if Path(model).exists():
        raise UsageError(f"{model} holds no config.json; name the directory of a model")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # its errors range from a malformed name to a network that is not there
        raise UsageError(f"the Hugging Face Hub gives no config.json for {model}: {first_line(error)}") from error


def _dtype(shape: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The dtype a model computes in: written as ``dtype`` or ``torch_dtype``, inside or outside."""
    found = (source.get(key) for source in (shape, config) for key in ("dtype", "torch_dtype"))
    name = str(next(filter(None, found), "bfloat16"))
    return name if name in DTYPES else "bfloat16"
