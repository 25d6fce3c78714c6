"""Names of models and datasets: a directory of this machine, or a name on the Hugging Face Hub.

Whoever takes such a name looks here first. What looks like a path is never taken for a name on the Hub, and the Hub is
asked once, for a few seconds, before a library is let at it that asks again and again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from sglang_capture.errors import UsageError

Kind = Literal["model", "dataset"]

_ASK_SECONDS: Final = 5.0
_EXAMPLES: Final[dict[Kind, str]] = {"model": "Qwen/Qwen3-8B", "dataset": "HuggingFaceH4/ultrachat_200k"}


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be meant as a path: names on the Hub are ``owner/name``."""
    return name in (".", "..") or name.startswith(("/", "./", "../", "~")) or "\\" in name or name.count("/") > 1


def check_place(name: str | None, option: str) -> None:
    """Whether what looks like a path is a directory; asked early, before anything is read.

    Args:
        name: ``None`` if the option is not given.
        option: what the user gave the name for, as in ``--model``.

    Raises:
        UsageError: it is not.
    """
    if name is None or Path(name).is_dir():
        return
    takes = f"{option} takes a directory, or a name on the Hugging Face Hub"
    if Path(name).exists():
        raise UsageError(f"{name} is a file; {takes}")
    if looks_like_path(name):
        raise UsageError(f"there is no directory {name}; {takes}")


def find(name: str, option: str, kind: Kind = "model") -> None:
    """Whether there is something of that name: here, in the Hub's cache, or on the Hub.

    A Hub that answers with a fault of its own is no reason to refuse: what is loaded next says more of it.

    Raises:
        UsageError: there is nothing, or the Hub cannot be asked.
    """
    check_place(name, option)
    if Path(name).is_dir():
        return
    missing = f"{option} {name}: there is no such directory"
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        raise UsageError(f"{missing}; for a {kind} on the Hub: pip install 'sglang-capture[transformers]'") from None
    if _is_cached(name, kind):
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_ASK_SECONDS)
    except GatedRepoError:  # also a RepositoryNotFoundError
        return
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UsageError(
            f"{missing}, and no {kind} of that name on the Hugging Face Hub; expected a directory, or a name like "
            f"{_EXAMPLES[kind]}: correct the name, or log in with `hf auth login` if it is private"
        ) from error
    except HfHubHTTPError:
        return
    except Exception as error:  # of the network, in as many classes as there are libraries
        raise UsageError(
            f"{missing}, and the Hugging Face Hub cannot be asked for a {kind} of that name ({first_line(error)}): "
            "correct the name, or try again where the Hub can be reached"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says first, its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _is_cached(name: str, kind: Kind) -> bool:
    """Whether some of it was downloaded before; then it is used also where there is no network."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "snapshots").is_dir()
