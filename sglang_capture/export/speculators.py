"""speculators: ``speculators train`` reading an arrow table and a file of hidden states for each of its rows.

::

    <out>/state.json, dataset_info.json, data-00000.arrow    input_ids, loss_mask (int64 lists), seq_len; torch format
    <out>/hidden_states/hs_0.safetensors                     for row 0 of the table, and so on without holes
    <out>/token_freq.pt                                      {token id: times supervised}
    <out>/d2t-32000.npy, t2d-32000.npy                       with --draft-vocab-size 32000

Each file of hidden states, for a sample of S tokens and L layers:

    token_ids              int64 [S]
    hidden_states          bfloat16 [S, L + 1, H]    the layers, low to high, then the last hidden state *before*
                                                     the final norm
    hidden_states_scales   float32 [S, 1, 1]         with fp8 only, and then hidden_states is float8_e4m3fn

The trainer applies the target's own final norm, so the state after it would be normed twice, and nothing would say so.
It drops samples whose ``token_ids`` are not the row's ``input_ids``; a file that is short of rows moves all samples
after it in a pack, unnoticed. Layer ids are hidden-state indices, as vLLM counts (read in speculators and
hs-connectors 0.9.0: ``train/data.py``, ``train/cli.py``, ``transfer.py``, ``fp8_utils.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy
import torch
from safetensors.torch import load_file

from sglang_capture.dump import Dump
from sglang_capture.export.arrow import SEAL, write_batches, write_state
from sglang_capture.export.base import ExportError
from sglang_capture.export.folder import Lineage, read_records
from sglang_capture.export.libraries import need_library
from sglang_capture.export.needs import POST, PRE, need_draft_vocabulary
from sglang_capture.export.options import ExportOptions
from sglang_capture.export.samples import check_finite, cut, dtype_notes, dump_of
from sglang_capture.export.sharded import ShardedExporter, ShardJob, Written
from sglang_capture.export.tensor_file import whole, write_tensors
from sglang_capture.export.vocab import map_from_counts, token_counts
from sglang_capture.shards import CaptureDataset
from sglang_capture.source import Source, SourceError
from sglang_capture.spec import CaptureSpec

_NAME: Final = "speculators"
_TABLE: Final = "data-00000.arrow"
_ROWS_A_BATCH: Final = 256

_FP8: Final = torch.float8_e4m3fn
_SMALLEST_SCALE: Final = 1e-12


class Speculators(ShardedExporter):
    name = _NAME
    description = "speculators, all draft kinds (arrow table and .safetensors, bfloat16 or fp8)"
    options = frozenset({"draft_vocab_size", "fp8", "seq_length"})
    seal = SEAL

    def check(self, spec: CaptureSpec, options: ExportOptions) -> None:
        if PRE not in spec.last_hidden_keys:
            reason = "; the one after the norm cannot be turned back" if POST in spec.last_hidden_keys else ""
            raise ExportError(
                "speculators needs the last hidden state before the final norm (pre), and applies the norm itself; "
                f"found last_hidden = {spec.last_hidden}{reason}: capture again with SGLANG_CAPTURE_LAST_HIDDEN=pre "
                "(or both)"
            )
        need_draft_vocabulary(spec, options)
        need_library("datasets", self.name)

    def start(self, dataset: CaptureDataset, rows: Sequence[int], options: ExportOptions) -> ShardJob:
        return _Job(dataset, options)

    def read(self, out: Path, lineage: Lineage) -> Source:
        """Row i of the table with file i, which must hold the same tokens, as the trainer pairs them."""
        records = read_records(out)
        try:
            table = need_library("datasets", self.name).load_from_disk(str(out))
            places = {records[_file_name(row)].sample_id: row for row in range(len(table))}
        except Exception as error:  # whatever the library raises
            raise SourceError(f"{out} is not what was exported ({error}): run the export again") from error

        def load(sample_id: str) -> Dump:
            row = places[sample_id]
            file = out / _file_name(row)
            try:
                content = load_file(file)
                if not torch.equal(content["token_ids"], table[row]["input_ids"]):
                    raise ValueError(f"its token_ids are not the input_ids of row {row} of the table")
                states = restore(content)
                last = {PRE: states[:, -1]}
                return dump_of(sample_id, lineage.spec, content["token_ids"], states[:, :-1], last)
            except Exception as error:  # whatever the readers and the tensors' shapes raise
                raise SourceError(f"{file} is not what was exported ({error}): run the export again") from error

        return Source(list(places), load)


def quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[S, L + 1, H]`` in float8_e4m3fn, and the scale of each token: float32 ``[S, 1, 1]``.

    The scale brings the token's largest number, over all its slots, to the largest that the type holds (448); it is at
    least 1e-12. The rule of ``hs_connectors.fp8_utils.quantize_tensor_to_fp8`` (0.9.0).
    """
    wide = states.float()
    largest = wide.abs().amax(dim=(1, 2), keepdim=True)
    scales = (largest / torch.finfo(_FP8).max).clamp(min=_SMALLEST_SCALE)
    return (wide / scales).to(_FP8), scales


def restore(content: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The hidden states of a file as the trainer gets them: bfloat16 ``[S, L + 1, H]``.

    fp8 is multiplied out in bfloat16, as ``FP8Transfer`` does by default.
    """
    states, scales = content["hidden_states"], content.get("hidden_states_scales")
    return states if scales is None else states.to(torch.bfloat16) * scales.to(torch.bfloat16)


class _Job(ShardJob):
    samples_a_file = 1

    def __init__(self, dataset: CaptureDataset, options: ExportOptions) -> None:
        self._dataset, self._options = dataset, options

    def file_name(self, number: int) -> str:
        return _file_name(number)

    def check_sample(self, sample: Mapping[str, Any]) -> None:
        for name in ("hidden_states", PRE):
            check_finite(name, sample[name][: self._options.seq_length].to(torch.bfloat16))

    def write(self, sink: BinaryIO, rows: Sequence[int]) -> None:
        sample = self._sample(rows[0])
        states = torch.cat([sample["hidden_states"], sample[PRE][:, None]], dim=1)
        if self._options.fp8:
            stored, scales = quantize(states)
            hidden = {"hidden_states_scales": whole(scales), "hidden_states": whole(stored)}
        else:
            hidden = {"hidden_states": whole(states.to(torch.bfloat16))}
        write_tensors(sink, {"token_ids": whole(sample["input_ids"]), **hidden}, {"sample_id": sample["sample_id"]})

    def write_beside(self, done: Written) -> list[str]:
        counts = token_counts(self._dataset, done.rows, seq_length=self._options.seq_length)
        frequencies = {int(token): int(counts[token]) for token in counts.nonzero().flatten()}
        done.put("token_freq.pt", "", lambda sink: torch.save(frequencies, sink))
        notes = self._write_vocab(done, counts)
        library = need_library("datasets", _NAME)
        numbers = library.List(library.Value("int64"))
        features = library.Features({"input_ids": numbers, "loss_mask": numbers, "seq_len": library.Value("int64")})
        done.put(_TABLE, "", lambda sink: write_batches(sink, features, self._table(done.rows), _NAME))
        write_state(done, features, [_TABLE], _NAME)
        return [*notes, *self._notes()]

    def _write_vocab(self, done: Written, counts: torch.Tensor) -> list[str]:
        notes = []
        if size := self._options.draft_vocab_size:
            vocab = map_from_counts(counts, size)
            done.put(f"d2t-{size}.npy", "", lambda sink: numpy.save(sink, vocab.d2t.numpy()))
            done.put(f"t2d-{size}.npy", "", lambda sink: numpy.save(sink, vocab.t2d.numpy()))
            notes = [vocab.note]
        others = {path.name for path in done.folder.out.glob("?2?-*.npy")} - set(done.records)
        if others:
            notes.append(
                f"{', '.join(sorted(others))} were made by the trainer from what was here before, and it will take "
                "them again: remove them if the data has changed"
            )
        return notes

    def _table(self, rows: list[int]) -> Iterator[dict[str, list[Any]]]:
        for first in range(0, len(rows), _ROWS_A_BATCH):
            samples = [self._sample(row) for row in rows[first : first + _ROWS_A_BATCH]]
            yield {
                "input_ids": [sample["input_ids"] for sample in samples],
                "loss_mask": [sample["loss_mask"].long() for sample in samples],
                "seq_len": [len(sample["input_ids"]) for sample in samples],
            }

    def _sample(self, row: int) -> dict[str, Any]:
        return cut(self._dataset[row], self._options.seq_length)

    def _notes(self) -> list[str]:
        spec = self._dataset.spec
        layers = " ".join(map(str, spec.layers))
        notes = [
            f"train with --target-layer-ids {layers} (hidden-state indices, as vLLM counts); the last slot of "
            "hidden_states is the last hidden state before the final norm"
        ]
        if not self._options.fp8:
            return [*notes, *dtype_notes(spec)]
        return [
            *notes,
            f"hidden states were rounded from {spec.dtype} to float8_e4m3fn, one scale for all slots of a token, which "
            "costs about 3 % of each number and more of those far below the token's largest: train with "
            "--hidden-states-backend fp8",
        ]


def _file_name(number: int) -> str:
    return f"hidden_states/hs_{number}.safetensors"
