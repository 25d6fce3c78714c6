"""Vocabulary maps: which tokens are counted, which are taken, and the form each trainer loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from factories import make_dump, make_spec

from sglang_capture.export import ExportError, ExportOptions, export_dataset
from sglang_capture.export.vocab import map_from_counts, token_counts, vocab_map
from sglang_capture.shards import CaptureDataset, DatasetWriter, Sample

SPEC = make_spec(vocab_size=8)


def dataset_of(path: Path, *samples: tuple[Sequence[int], Sequence[int] | None]) -> CaptureDataset:
    """A dataset of these ids and loss masks."""
    written = []
    for number, (ids, mask) in enumerate(samples):
        dump = make_dump(SPEC, f"s{number}", len(ids))
        dump.input_ids.copy_(torch.tensor(ids))
        written.append(Sample(f"s{number}", dump, loss_mask=None if mask is None else torch.tensor(mask)))
    with DatasetWriter(path, SPEC) as writer:
        writer.write_shard(written)
    return CaptureDataset(path)


def test_a_map_computed_by_hand(tmp_path: Path) -> None:
    # Supervised: 6 three times, 2 twice, 5 once; 0 and 1 are of the prompt.
    dataset = dataset_of(tmp_path, ([0, 1, 6, 6, 2], [0, 0, 1, 1, 1]), ([1, 5, 2, 6], [0, 1, 1, 1]))
    found = vocab_map(dataset, range(2), 3)
    assert found.target_ids.tolist() == [2, 5, 6]
    assert found.d2t.tolist() == [2, 4, 4] and found.d2t.dtype == torch.int64
    assert found.t2d.tolist() == [False, False, True, False, False, True, True, False]
    assert found.coverage == 1.0
    assert vocab_map(dataset, range(2), 2).target_ids.tolist() == [2, 6]
    assert vocab_map(dataset, range(2), 2).coverage == pytest.approx(5 / 6)
    assert "holds 83.33% of the supervised tokens" in vocab_map(dataset, range(2), 2).note


def test_the_mask_is_not_moved_and_the_first_and_last_tokens_count(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, ([3, 4, 7], [1, 0, 1]))
    assert token_counts(dataset, [0]).tolist() == [0, 0, 0, 1, 0, 0, 0, 1]


def test_a_sample_without_a_mask_is_counted_wholly(tmp_path: Path) -> None:
    assert token_counts(dataset_of(tmp_path, ([3, 3, 1], None)), [0]).tolist() == [0, 1, 0, 2, 0, 0, 0, 0]


def test_only_the_rows_asked_for_and_the_tokens_kept_are_counted(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, ([1, 2, 3], None), ([4, 5, 6], None))
    assert token_counts(dataset, [1]).nonzero().flatten().tolist() == [4, 5, 6]
    assert token_counts(dataset, [1], seq_length=2).nonzero().flatten().tolist() == [4, 5]


@pytest.mark.parametrize(
    ("counts", "size", "chosen"),
    [
        ([0, 5, 5, 5], 2, [1, 2]),  # of equal counts the lower ids
        ([0, 0, 0, 9], 3, [0, 1, 3]),  # filled up with the lowest ids that were not counted
        ([0, 0, 0, 0], 2, [0, 1]),
        ([7, 0, 2, 9], 4, [0, 1, 2, 3]),
    ],
)
def test_ties_and_gaps_are_filled_from_below(counts: list[int], size: int, chosen: list[int]) -> None:
    found = map_from_counts(torch.tensor(counts), size)
    assert found.target_ids.tolist() == chosen
    assert found.t2d.nonzero().flatten().tolist() == chosen


def test_the_whole_vocabulary_is_the_identity() -> None:
    found = map_from_counts(torch.arange(8), 8)
    assert found.d2t.tolist() == [0] * 8 and bool(found.t2d.all())


@pytest.mark.parametrize("size", [0, -1, 9])
def test_sizes_no_vocabulary_can_have_are_refused(size: int) -> None:
    with pytest.raises(ExportError, match=rf"1 to 8 tokens .*found {size}.*--draft-vocab-size"):
        map_from_counts(torch.zeros(8, dtype=torch.int64), size)


def test_a_token_id_outside_the_vocabulary_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="s0 holds token id 8, and the vocabulary has 8"):
        token_counts(dataset_of(tmp_path, ([1, 8], None)), [0])


def test_specforge_gets_both_maps_where_it_keeps_its_own(tmp_path: Path) -> None:
    dataset_of(tmp_path / "data", ([3, 6, 6], [0, 1, 1]))
    options = ExportOptions(draft_vocab_size=2)
    notes = export_dataset(tmp_path / "data", "specforge", tmp_path / "out", options=options).notes
    content = torch.load(tmp_path / "out/vocab_mapping/vocab_mapping.pt", weights_only=True)
    assert content["d2t"].tolist() == [0, 5] and content["d2t"].dtype == torch.int64
    assert content["t2d"].nonzero().flatten().tolist() == [0, 6] and content["t2d"].dtype == torch.bool
    assert "holds 100.00% of the supervised tokens" in " ".join(notes)


def test_modelopt_gets_the_offsets_in_a_file_it_does_not_take_for_a_sample(tmp_path: Path) -> None:
    dataset_of(tmp_path / "data", ([3, 6, 6], [0, 1, 1]))
    options = ExportOptions(draft_vocab_size=2)
    notes = export_dataset(tmp_path / "data", "modelopt", tmp_path / "out", options=options).notes
    offsets = torch.load(tmp_path / "out/draft_vocab_cache-2.d2t", weights_only=True)
    assert offsets.tolist() == [0, 5] and offsets.dtype == torch.int64
    assert len(list((tmp_path / "out").rglob("*.pt"))) == 1
    assert "set data.draft_vocab_cache to draft_vocab_cache-2.d2t" in " ".join(notes)


@pytest.mark.parametrize("to", ["specforge", "modelopt", "angelslim"])
def test_a_draft_vocabulary_above_the_targets_is_refused_before_anything_is_written(tmp_path: Path, to: str) -> None:
    dataset_of(tmp_path / "data", ([3, 6], None))
    with pytest.raises(ExportError, match="at most the 8 tokens"):
        export_dataset(tmp_path / "data", to, tmp_path / "out", options=ExportOptions(draft_vocab_size=9))
    assert not (tmp_path / "out").exists()
