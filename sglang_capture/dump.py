"""One dump: the hidden states of one marked request, as a ``.pt`` file.

``torch.load(path, weights_only=True, mmap=True)`` gives a dictionary (T tokens, L layers, hidden size H):

=========================== ==========================================================================
``capture_id, request_id``  str
``input_ids``               int64 ``[T]``: the vocabulary id of each row, as the engine ran it
``hidden_states``           the engine's dtype ``[T, L, H]``, in ascending order of index
``layers``                  list of L hidden-state indices
``last_hidden_state``       ``[T, H]`` after the final norm, where asked for
``last_hidden_state_prenorm``  ``[T, H]`` before the final norm, where asked for
``nonfinite_rows``          int64 scalar: tokens with NaN or Inf in any of their rows; in labelled dumps
``zero_rows``               int64 scalar: tokens with a row that is zero throughout; in labelled dumps
``spec``                    str: the JSON of a :class:`~sglang_capture.spec.CaptureSpec`
=========================== ==========================================================================

The prompt's length is known before its first row is computed, so the file is laid out once, its pages reserved, the
rows copied straight to their place, and the finished file given its name in one step (:class:`DumpFile`).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sglang_capture.mapped_file import MappedFile
from sglang_capture.spec import CaptureSpec, SpecError

LABELS = ("nonfinite_rows", "zero_rows")
"""The scalars that a labelled dump has beside its rows."""


class DumpError(RuntimeError):
    """A dump that cannot be read: truncated, no dump at all, or not what its spec says."""


@dataclass(frozen=True)
class Dump:
    """A dump as read: T tokens, L layers, hidden size H; the tensors map the file's pages.

    Attributes:
        input_ids: int64 ``[T]``.
        hidden_states: the engine's dtype, ``[T, L, H]``, in the order of ``spec.layers``.
        last_hidden: by key (``last_hidden_state`` after the final norm, ``last_hidden_state_prenorm`` before it),
            ``[T, H]`` each.
        nonfinite_rows, zero_rows: tokens with NaN or Inf, and with a row of zeros only.
        inode: of its file: another dump may have its name by now. 0 where it comes from none.
    """

    capture_id: str
    request_id: str
    spec: CaptureSpec
    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    last_hidden: dict[str, torch.Tensor]
    nonfinite_rows: int = 0
    zero_rows: int = 0
    inode: int = 0

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])


def load_dump(path: Path) -> Dump:
    """Map a dump and check it against its own spec.

    Raises:
        FileNotFoundError: it is gone (packed or deleted meanwhile).
        DumpError: it is truncated, or its tensors are not what its spec says.
    """
    # Opened once: torch opens a path twice, for the records and for the rows, and another dump may have come between.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # to open a pipe may take for ever
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DumpError(f"{path} is no readable dump: it is no file")
        content = torch.load(f"/proc/self/fd/{descriptor}", map_location="cpu", weights_only=True, mmap=True)
    except DumpError:
        raise
    except Exception as error:  # torch.load raises whatever zipfile, pickle and the C++ reader raise
        # What torch says is for who saves and loads by hand, and advises what would run code in the file.
        raise DumpError(f"{path} is no readable dump: another kind of file, or truncated") from error
    finally:
        os.close(descriptor)
    return replace(dump_from(content, path), inode=found.st_ino)


def dump_from(content: object, source: object) -> Dump:
    """The checked :class:`Dump` of a loaded dictionary; ``source`` is named in errors.

    Raises:
        DumpError: a key is missing, or a tensor is not what the spec says.
    """
    if not isinstance(content, dict):
        raise DumpError(f"{source} holds a {type(content).__name__}, and a dump is a dictionary")
    try:
        spec = CaptureSpec.from_json(content["spec"])
        for key in ("input_ids", "hidden_states", *spec.last_hidden_keys):
            if not isinstance(content[key], torch.Tensor) or content[key].ndim == 0:
                raise SpecError(f"{key} must be a tensor of rows; found {content[key]!r:.80}")
        dump = Dump(
            capture_id=content["capture_id"],
            request_id=content["request_id"],
            spec=spec,
            input_ids=content["input_ids"],
            hidden_states=content["hidden_states"],
            last_hidden={key: content[key] for key in spec.last_hidden_keys},
            **{key: int(content.get(key, 0)) for key in LABELS},
        )
    except (KeyError, SpecError, TypeError, ValueError, RuntimeError) as error:  # the last: a label of many numbers
        raise DumpError(f"{source} is not a dump of this format: {error}") from error
    for name, tensor, shape, dtype in expected_tensors(dump.tokens, spec, dump):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise DumpError(f"{source}: {name} is {tensor.dtype} {list(tensor.shape)}, its spec says {dtype} {shape}")
    return dump


def expected_tensors(
    tokens: int, spec: CaptureSpec, dump: Dump
) -> list[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype]]:
    """Each tensor of a dump with the shape and dtype that ``spec`` gives it."""
    hidden, dtype = spec.hidden_size, spec.torch_dtype
    return [
        ("input_ids", dump.input_ids, (tokens,), torch.int64),
        ("hidden_states", dump.hidden_states, (tokens, len(spec.layers), hidden), dtype),
        *((key, tensor, (tokens, hidden), dtype) for key, tensor in dump.last_hidden.items()),
    ]


class DumpFile:
    """A dump being filled: laid out and its pages reserved by the constructor, published by :meth:`publish`.

    The tensors ``hidden_states`` ``[T, L, H]`` and ``last_hidden[key]`` ``[T, H]`` *are* the file's pages: a row copied
    into them is in the file, with no later assembly, copy or serialisation. Every page is reserved with
    ``posix_fallocate`` before anything is mapped: writing through a mapping to a page that a full tmpfs cannot give is
    SIGBUS, the end of the process. Nobody may truncate the file while it is mapped.

    A labelled file has room for :data:`LABELS`, which :meth:`label` fills in.

    Laying out and reserving costs about as much as zeroing the pages; do it off the engine's thread.

    Raises:
        OSError: the pages cannot be had (``ENOSPC``, ``EDQUOT``), or the directory cannot be written. Nothing is left.
    """

    def __init__(
        self,
        part: Path,
        capture_id: str,
        request_id: str,
        spec: CaptureSpec,
        input_ids: torch.Tensor,
        *,
        labelled: bool = False,
        file: MappedFile | None = None,
    ):
        content = _layout(capture_id, request_id, spec, int(input_ids.shape[0]))
        if labelled:  # behind the other tensors: who attaches to the file need not know
            content.update({key: torch.empty((), dtype=torch.int64) for key in LABELS})
        self.file = file or MappedFile.create(part)
        try:
            _lay_out(self.file, content, reserve=reserved_bytes(len(input_ids), spec))
            self._map(content, spec)
        except BaseException:
            self.discard()
            raise
        self._views["input_ids"].copy_(input_ids)

    @classmethod
    def attach(cls, part: Path, capture_id: str, request_id: str, spec: CaptureSpec, tokens: int) -> DumpFile:
        """The same file in another process: what one lays out, several may fill.

        Raises:
            OSError: it is gone.
        """
        dump = cls.__new__(cls)
        dump.file = MappedFile.attach(part)
        dump._map(_layout(capture_id, request_id, spec, tokens), spec)
        return dump

    @property
    def bytes(self) -> int:
        """The file's length."""
        return self.file.bytes

    def _map(self, content: dict[str, Any], spec: CaptureSpec) -> None:
        self.spec = spec
        self._views = _map_tensors(self.file, content)
        self.hidden_states = self._views["hidden_states"]
        self.last_hidden = {key: self._views[key] for key in spec.last_hidden_keys}

    def label(self, *, nonfinite: int, zero: int) -> None:
        """Write down how many tokens have NaN or Inf, and how many a row of zeros only, if the file is labelled."""
        for key, count in zip(LABELS, (nonfinite, zero), strict=True):
            if key in self._views:
                self._views[key].fill_(count)

    def publish(self, final: Path) -> bool:
        """Give the finished file its name, all at once.

        Returns:
            False if a dump of that name stood there already: the first complete one stands, this one is removed.
        """
        try:
            os.link(self.file.path, final)
        except FileExistsError:
            return False
        finally:
            self.discard()
        return True

    def discard(self) -> None:
        """Remove the unpublished name; the mapping lives until the tensors are dropped."""
        self.file.remove()


def reserved_bytes(tokens: int, spec: CaptureSpec) -> int:
    """Most bytes that the file of a capture takes: its payload and a few KB."""
    return tokens * spec.bytes_per_token + _LAYOUT_BYTES


_LAYOUT_BYTES = 16 * 1024
"""Room for the zip records, the pickle and the spec; what is not used is given back."""


def _layout(capture_id: str, request_id: str, spec: CaptureSpec, tokens: int) -> dict[str, Any]:
    """What the file will hold. The tensors are never touched, so they cost address space only."""
    hidden, dtype = spec.hidden_size, spec.torch_dtype
    return {
        "capture_id": capture_id,
        "request_id": request_id,
        "input_ids": torch.empty(tokens, dtype=torch.int64),
        "hidden_states": torch.empty(tokens, len(spec.layers), hidden, dtype=dtype),
        "layers": list(spec.layers),
        **{key: torch.empty(tokens, hidden, dtype=dtype) for key in spec.last_hidden_keys},
        "spec": spec.to_json(),
    }


def _lay_out(file: MappedFile, content: dict[str, Any], *, reserve: int) -> None:
    """Reserve the pages, then write all of the ``.pt`` but the tensors' data."""
    file.reserve(reserve)
    with os.fdopen(file.descriptor, "r+b", closefd=False) as stream:
        stream.seek(0)
        with torch.serialization.skip_data():  # thread-local: the engine's own saves never see it
            torch.save(content, stream)
        stream.flush()
        end = stream.tell()
    file.end_at(end)  # a zip must end where the file ends


def _map_tensors(file: MappedFile, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of ``content`` as views of the file's pages.

    ``torch.save`` writes storages as records ``data/0``, ``data/1``, … in the order in which the pickle meets them.
    """
    records = torch._C.PyTorchFileReader(str(file.path))
    views = {}
    tensors = [(name, value) for name, value in content.items() if isinstance(value, torch.Tensor)]
    for number, (name, tensor) in enumerate(tensors):
        offset = records.get_record_offset(f"data/{number}")  # type: ignore[attr-defined]  # missing in torch's stubs
        views[name] = file.view(tensor.dtype, tensor.numel(), offset).view(tensor.shape)
    return views
