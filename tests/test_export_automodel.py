"""NeMo Automodel's caches, read as Automodel reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_dump, make_spec
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sglang_capture.dump import Dump
from sglang_capture.export import ExportError, ExportOptions, ExportSummary, automodel, export_dataset
from sglang_capture.shards import CaptureDataset, DatasetWriter, Sample
from sglang_capture.verify_sources import open_source

SPEC = make_spec(hidden_size=2, vocab_size=4, dtype="float32", num_layers=61)
EMBEDDINGS = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])
HEAD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
POST, PRE = "last_hidden_state", "last_hidden_state_prenorm"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A target's directory, with a head of a multi-token-prediction layer that must not be taken."""
    return write_model(tmp_path / "model")


def write_model(path: Path, *, without: str = "", **config: Any) -> Path:
    path.mkdir()
    tensors = {
        "model.embed_tokens.weight": EMBEDDINGS,
        "lm_head.weight": HEAD,
        "model.norm.weight": torch.tensor([2.0, 1.0]),
        "model.layers.61.embed_tokens.weight": EMBEDDINGS + 100,
    }
    tensors.pop(without, None)
    save_file(tensors, path / "model.safetensors")
    basics = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rms_norm_eps": 1e-6}
    (path / "config.json").write_text(json.dumps({**basics, **config}))
    return path


def sample_of(sample_id: str, ids: list[int], mask: list[int], last: list[list[float]], spec: Any = SPEC) -> Sample:
    """Hidden states are 100 · token + 10 · layer + dimension."""
    grid = torch.arange(len(ids)).view(-1, 1, 1) * 100 + torch.arange(3).view(1, -1, 1) * 10 + torch.arange(2)
    key = POST if spec.last_hidden == "post" else PRE
    dump = Dump(
        capture_id=sample_id,
        request_id="",
        spec=spec,
        input_ids=torch.tensor(ids),
        hidden_states=grid.to(spec.torch_dtype),
        last_hidden={key: torch.tensor(last, dtype=spec.torch_dtype)},
    )
    return Sample(sample_id, dump, loss_mask=torch.tensor(mask))


def by_hand(spec: Any = SPEC) -> Sample:
    return sample_of("hand", [3, 1, 2], [0, 1, 1], [[9.0, 9.0], [2.0, -1.0], [1.0, 3.0]], spec)


def write(tmp_path: Path, *samples: Sample) -> None:
    with DatasetWriter(tmp_path / "data", samples[0].dump.spec) as writer:
        writer.write_shard(samples)


def export(tmp_path: Path, to: str, **options: Any) -> ExportSummary:
    wanted = {"model": str(tmp_path / "model"), "seq_length": 4, **options}
    if to == "automodel-eagle3":
        wanted.setdefault("draft_vocab_size", 2)
    return export_dataset(tmp_path / "data", to, tmp_path / "out", options=ExportOptions(**wanted))


def load_as_automodel(folder: Path) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """The reading rule of Automodel 0.7 (CachedTensorDataset): shards exactly 0 to N-1, slices by the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    samples, size = manifest["num_samples"], manifest["shard_size"]
    names = sorted(path.name for path in folder.glob("shard-*.safetensors"))
    assert names == [f"shard-{number:06d}.safetensors" for number in range(-(-samples // size))]
    batch = []
    for index in range(samples):
        with safe_open(folder / names[index // size], framework="pt") as shard:
            batch.append({key: shard.get_slice(key)[index % size] for key in shard.keys()})  # noqa: SIM118
    return manifest, batch


def test_an_eagle3_sample_computed_by_hand(tmp_path: Path, model: Path) -> None:
    write(tmp_path, by_hand())
    export(tmp_path, "automodel-eagle3")
    manifest, (got,) = load_as_automodel(tmp_path / "out")
    # The supervised tokens, 1 and 2, are the draft's. Token 1 says [2, -1, 1, 0], so its first choice, 0, is not one
    # the draft has; token 2 says [1, 3, 4, 0], and 2 is.
    assert got["input_ids"].tolist() == [1, 2, 0, 0] and got["input_ids"].dtype == torch.int64
    assert got["loss_mask"].tolist() == [1, 1, 0, 0]
    assert got["attention_mask"].tolist() == [1, 1, 1, 0]
    assert got["aux_hidden_states"].tolist() == [
        [0, 1, 10, 11, 20, 21],
        [100, 101, 110, 111, 120, 121],
        [200, 201, 210, 211, 220, 221],
        [0] * 6,
    ]
    assert got["position_mask"].tolist() == [[False], [True], [False], [False]]
    high, low = 1 / (1 + torch.e**-2), 1 / (1 + torch.e**-1)
    expected = torch.tensor([[1 - high, high], [1 - low, low], [0.5, 0.5], [0.5, 0.5]])
    assert torch.allclose(got["target_probs"], expected, atol=1e-6)
    assert load_file(tmp_path / "out/target_embeddings.safetensors")["weight"].equal(EMBEDDINGS)
    assert manifest == {
        "format_version": 2,
        "target_model": str(model),
        "target_vocab_size": 4,
        "draft_vocab_size": 2,
        "seq_length": 4,
        "dtype": "fp32",
        "num_samples": 1,
        "shard_size": 64,
        "target_probs_topk": 0,
        "aux_hidden_dim": 6,
        "aux_layer_ids": [2, 30, 58],
        "selected_token_ids": [1, 2],
        "input_data": f"sglang-capture dataset {CaptureDataset(tmp_path / 'data').manifest.dataset_id}",
        "split": None,
        "shuffle_seed": 0,
        "mask_reasoning_content": False,
        "mask_generation_prompt": False,
    }


def test_a_dspark_sample_computed_by_hand(tmp_path: Path, model: Path) -> None:
    write(tmp_path, by_hand())
    export(tmp_path, "automodel-dspark")
    manifest, (got,) = load_as_automodel(tmp_path / "out")
    assert set(got) == {"input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"}
    assert got["input_ids"].tolist() == [3, 1, 2, 0] and got["loss_mask"].tolist() == [0, 1, 1, 0]
    assert got["target_hidden_states"][1].tolist() == [100, 101, 110, 111, 120, 121]
    assert got["target_hidden_states"][3].tolist() == [0] * 6
    assert got["target_last_hidden_states"].tolist() == [[9, 9], [2, -1], [1, 3], [0, 0]]
    weights = load_file(tmp_path / "out/target_weights.safetensors")
    assert weights["embed_tokens.weight"].equal(EMBEDDINGS) and weights["lm_head.weight"].equal(HEAD)
    told = {"complete": True, "target_model_type": "deepseek_v3", "target_layer_ids": [2, 30, 58], "hidden_size": 2}
    shapes = {"num_hidden_layers": 61, "target_hidden_dim": 6, "target_last_hidden_dim": 2, "format_version": 1}
    assert {key: manifest[key] for key in (*told, *shapes)} == {**told, **shapes}


def test_the_embeddings_are_layer_minus_one_for_dspark_and_refused_for_eagle3(tmp_path: Path, model: Path) -> None:
    write(tmp_path, by_hand(SPEC.model_copy(update={"layers": (0, 3, 31)})))
    export(tmp_path, "automodel-dspark")
    assert load_as_automodel(tmp_path / "out")[0]["target_layer_ids"] == [-1, 2, 30]
    with pytest.raises(ExportError, match=r"index 0 .* is the token embeddings"):
        export(tmp_path, "automodel-eagle3")


def test_long_samples_are_cut_and_the_mask_says_where_short_ones_end(tmp_path: Path, model: Path) -> None:
    long = sample_of("long", [1, 2, 3, 1, 2], [0, 0, 1, 1, 1], [[1.0, 2.0]] * 5)
    write(tmp_path, long, by_hand())
    summary = export(tmp_path, "automodel-eagle3")
    assert "1 of 2 samples were cut to their first 4 tokens" in summary.notes
    _, (first, second) = load_as_automodel(tmp_path / "out")
    assert first["input_ids"].tolist() == [2, 3, 1, 0] and first["loss_mask"].tolist() == [0, 1, 1, 0]
    assert first["attention_mask"].tolist() == [1, 1, 1, 1] and second["attention_mask"].tolist() == [1, 1, 1, 0]
    assert not bool(first["position_mask"][3])


def test_samples_stand_in_shards_by_their_number(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automodel.CacheJob, "samples_a_file", 2)
    monkeypatch.setattr(automodel, "SHARD_SIZE", 2)
    bad = sample_of("bad", [1, 2], [1, 1], [[1.0, float("nan")], [0.0, 0.0]])
    good = [sample_of(f"s{n}", [n % 4] * 2, [1, 1], [[1.0, 2.0]] * 2) for n in range(5)]
    write(tmp_path, good[0], bad, *good[1:])
    for to in ("automodel-eagle3", "automodel-dspark"):
        summary = export_dataset(
            tmp_path / "data",
            to,
            tmp_path / to,
            options=ExportOptions(
                model=str(model), seq_length=4, draft_vocab_size=2 if to == "automodel-eagle3" else None
            ),
        )
        assert [skip.sample_id for skip in summary.skipped] == ["bad"]
        manifest, batch = load_as_automodel(tmp_path / to)
        assert manifest["num_samples"] == 5
        first = 0 if to == "automodel-eagle3" else 1  # where the second token stands
        assert [int(got["input_ids"][first]) for got in batch] == [0, 1, 2, 3, 0]
        assert list(open_source(tmp_path / to).ids) == ["s0", "s1", "s2", "s3", "s4"]


def test_the_state_before_the_norm_is_normed_with_the_models_own_weight(tmp_path: Path, model: Path) -> None:
    spec = SPEC.model_copy(update={"last_hidden": "pre"})
    write(tmp_path, sample_of("hand", [3, 1], [0, 1], [[3.0, 4.0], [0.0, 1.0]], spec))
    notes = export(tmp_path, "automodel-dspark").notes
    (got,) = load_as_automodel(tmp_path / "out")[1]
    # rms of (3, 4) is √12.5; the weight is (2, 1).
    expected = torch.tensor([[6 / 12.5**0.5, 4 / 12.5**0.5], [0.0, 2**0.5]])
    assert torch.allclose(got["target_last_hidden_states"][:2], expected, atol=1e-5)
    assert "model.norm.weight" in " ".join(notes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_captures_type_is_kept(tmp_path: Path, model: Path, dtype: str) -> None:
    write(tmp_path, by_hand(SPEC.model_copy(update={"dtype": dtype})))
    export(tmp_path, "automodel-eagle3")
    manifest, (got,) = load_as_automodel(tmp_path / "out")
    assert manifest["dtype"] == {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert {str(got[name].dtype) for name in ("aux_hidden_states", "target_probs")} == {f"torch.{dtype}"}
    assert load_file(tmp_path / "out/target_embeddings.safetensors")["weight"].dtype == torch.float32


def test_a_head_tied_to_the_embeddings_is_these(tmp_path: Path) -> None:
    write_model(tmp_path / "model", without="lm_head.weight", tie_word_embeddings=True)
    write(tmp_path, by_hand())
    export(tmp_path, "automodel-dspark")
    assert load_file(tmp_path / "out/target_weights.safetensors")["lm_head.weight"].equal(EMBEDDINGS)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"without": "lm_head.weight"}, "one tensor lm_head.weight .* found none"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM"),
    ],
)
def test_targets_whose_logits_cannot_be_computed_are_refused(tmp_path: Path, made: dict[str, Any], told: str) -> None:
    write_model(tmp_path / "model", **made)
    write(tmp_path, by_hand())
    with pytest.raises(ExportError, match=told):
        export(tmp_path, "automodel-eagle3")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["automodel-eagle3", "automodel-dspark"])
def test_what_the_cache_cannot_be_made_without_is_asked_for(tmp_path: Path, to: str) -> None:
    write(tmp_path, by_hand())
    with pytest.raises(ExportError, match="needs --model, --seq-length"):
        export_dataset(tmp_path / "data", to, tmp_path / "out")


def test_captures_without_a_last_hidden_state_are_refused(tmp_path: Path, model: Path) -> None:
    spec = SPEC.model_copy(update={"last_hidden": "none"})
    write(tmp_path, Sample("a", make_dump(spec, "a", 3)))
    with pytest.raises(ExportError, match="found last_hidden = none"):
        export(tmp_path, "automodel-dspark")


def test_a_second_run_keeps_the_shards_until_the_draft_vocabulary_changes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automodel.CacheJob, "samples_a_file", 1)
    monkeypatch.setattr(automodel, "SHARD_SIZE", 1)
    write(tmp_path, by_hand())
    export(tmp_path, "automodel-eagle3")
    whole = (tmp_path / "out/shard-000000.safetensors").read_bytes()
    assert export(tmp_path, "automodel-eagle3").written == 0
    (tmp_path / "out/shard-000000.safetensors").write_bytes(whole[:-1])
    assert export(tmp_path, "automodel-eagle3").written == 1
    assert (tmp_path / "out/shard-000000.safetensors").read_bytes() == whole
    # Token 0 is the most frequent one now, so the columns of the first shard mean other tokens too.
    with DatasetWriter(tmp_path / "data", SPEC) as writer:
        writer.write_shard([sample_of("more", [0] * 4, [1] * 4, [[1.0, 0.0]] * 4)])
    assert export(tmp_path, "automodel-eagle3").written == 2
    assert load_as_automodel(tmp_path / "out")[0]["selected_token_ids"] == [0, 1]


def test_a_run_that_is_under_way_has_no_manifest(tmp_path: Path, model: Path) -> None:
    write(tmp_path, by_hand())
    export(tmp_path, "automodel-dspark")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    options = ExportOptions(model=str(model), seq_length=4)
    with pytest.raises(KeyboardInterrupt):
        export_dataset(tmp_path / "data", "automodel-dspark", tmp_path / "out", options=options, progress=stop)
    assert not (tmp_path / "out/manifest.json").exists()
    assert export(tmp_path, "automodel-dspark").written == 0


@pytest.mark.parametrize("to", ["automodel-eagle3", "automodel-dspark"])
def test_verify_reads_the_cache_as_automodel_does(tmp_path: Path, model: Path, to: str) -> None:
    sample = by_hand()
    write(tmp_path, sample)
    export(tmp_path, to)
    dump = open_source(tmp_path / "out").load("hand")
    assert torch.equal(dump.input_ids, sample.dump.input_ids)
    assert torch.equal(dump.hidden_states, sample.dump.hidden_states)
    if to == "automodel-dspark":
        assert torch.equal(dump.last_hidden[POST], sample.dump.last_hidden[POST])
    else:
        assert dump.spec.last_hidden == "none"
