"""The stand-in kernels of the test bed: they compute what SGLang takes them to compute."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang_capture_patches import cpu


@pytest.fixture
def sgl_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(cpu.standins())
    yield importlib.import_module("sgl_kernel")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def test_stand_in_kernels_can_be_imported_and_say_what_is_missing(sgl_kernel: Any) -> None:
    assert not hasattr(sgl_kernel, "__version__")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.anything_cpu is not available"):
        sgl_kernel.anything_cpu(1, out=2)


def test_stand_in_has_the_real_scalar_types(sgl_kernel: ModuleType) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed, so neither is the real sgl_kernel")
    module = importlib.import_module("sgl_kernel.scalar_type")
    assert module.scalar_types.uint4b8.size_bits == 4


PARENTS = [-1, 0, 0, 1, 1, 3]
"""A tree: two drafts after node 0, two more after the first of them, and one after the first of those."""
DEPTHS = [0, 1, 1, 2, 2, 3]
FIRST_CHILD, SIBLING = [1, 3, -1, 5, -1, -1], [-1, 2, -1, 4, -1, -1]
ANCESTORS = torch.tensor(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ],
    dtype=torch.bool,
)


class Tree:
    """What the kernels write of two requests' trees, of 10 and 20 tokens before them."""

    def __init__(self) -> None:
        self.lengths = torch.tensor([10, 20])
        self.mask = torch.zeros(2 * 6 * 6, dtype=torch.bool)
        self.positions = torch.empty(12, dtype=torch.int64)
        self.index, self.first_child, self.sibling = torch.full((3, 2, 6), -7)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.positions, self.index, self.first_child, self.sibling

    def check(self) -> None:
        for number, length in enumerate(self.lengths.tolist()):
            assert self.positions.view(2, 6)[number].tolist() == [length + depth for depth in DEPTHS]
            assert self.index[number].tolist() == list(range(number * 6, number * 6 + 6))
            assert self.first_child[number].tolist() == FIRST_CHILD
            assert self.sibling[number].tolist() == SIBLING


def test_a_tree_is_built_from_the_drafts_selected(sgl_kernel: Any) -> None:
    """Of two branches a step: places 0 and 1 follow node 0, places 2 and 3 follow place 0, place 6 follows place 2."""
    tree = Tree()
    parents, selected = torch.tensor([[-1, 0, 1, 2, 5]] * 2), torch.tensor([[0, 1, 2, 3, 6]] * 2)
    sgl_kernel.build_tree_kernel_efficient_cpu(parents, selected, tree.lengths, tree.mask, *tree.outputs, 2, 3, 6, 1)
    tree.check()
    assert all(torch.equal(mask, ANCESTORS) for mask in tree.mask.view(2, 6, 6))


def test_a_tree_is_read_from_its_mask(sgl_kernel: Any) -> None:
    tree, mask = Tree(), ANCESTORS.repeat(2, 1, 1).flatten()
    module = importlib.import_module("sgl_kernel.speculative")
    module.reconstruct_indices_from_tree_mask(mask, tree.lengths, *tree.outputs, 2, 6)
    tree.check()


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ({0: 31, 1: 33, 3: 35, 5: 99}, [0, 1, 3, 5]),
        ({0: 31, 1: 34, 4: 99}, [0, 1, 4]),
        ({0: 32, 2: 33}, [0, 2]),
        ({0: 33}, [0]),
    ],
)
def test_the_targets_own_tokens_are_followed_down_the_tree(
    sgl_kernel: Any, wanted: dict[int, int], path: list[int]
) -> None:
    """Node ``i`` drafts token ``30 + i``. The second request shows that requests do not mix."""
    drafted = torch.arange(30, 36).repeat(2, 1)
    target = torch.full((2, 6), 77)
    target[0, list(wanted)] = torch.tensor(list(wanted.values()))
    predicts, accepted, count = torch.zeros(12, dtype=torch.int32), torch.full((2, 4), -1), torch.zeros(2)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=drafted,
        retrive_index=torch.arange(12).view(2, 6),
        retrive_next_token=torch.tensor([FIRST_CHILD] * 2),
        retrive_next_sibling=torch.tensor([SIBLING] * 2),
        target_predict=target,
    )
    assert accepted.tolist() == [path + [-1] * (4 - len(path)), [6, -1, -1, -1]]
    assert count.tolist() == [len(path) - 1, 0]
    assert predicts[path].tolist() == [wanted[node] for node in path]
    assert predicts[6] == 77


def test_cache_places_go_into_the_table_and_come_out_again(sgl_kernel: Any) -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([3, 6])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, torch.arange(40, 45), 8)
    assert table.tolist() == [[0, 0, 0, 42, 43, 44, 0, 0], [0] * 8, [0, 40, 41, 0, 0, 0, 0, 0]]
    places = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, places, 8)
    assert places.tolist() == [40, 41, 42, 43, 44]


def test_each_branch_of_a_draft_has_places_of_its_own_behind_the_requests(sgl_kernel: Any) -> None:
    table = torch.arange(24, dtype=torch.int32).view(2, 12)
    rows, lengths = torch.tensor([1, 0]), torch.tensor([2, 3])
    places = torch.zeros(2 * 2 * 3, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, places, 12, 2, 3)
    assert places.view(2, 2, 3).tolist() == [[[14, 15, 16], [17, 18, 19]], [[3, 4, 5], [6, 7, 8]]]
    branches = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lengths, 2, 3, 12)
    assert branches[0, :5].tolist() == [12, 13, 14, 15, 16]
    assert branches[1, :5].tolist() == [12, 13, 17, 18, 19]
    assert branches[3, :6].tolist() == [0, 1, 2, 6, 7, 8]


def test_what_was_accepted_is_picked(sgl_kernel: Any) -> None:
    tokens, bonus = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.zeros(2, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 7]
    places = torch.zeros(3, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.arange(60, 66), places)
    assert places.tolist() == [60, 62, 63]


def test_cache_rows_are_moved_in_all_layers(sgl_kernel: Any) -> None:
    layers = [torch.arange(12.0).view(6, 2), torch.arange(100.0, 118.0).view(6, 3)]
    before = [layer.clone() for layer in layers]
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    sizes = torch.tensor([layer.stride(0) * 4 for layer in layers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(addresses, sizes, torch.tensor([1, 2]), torch.tensor([2, 5]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[0, 2, 5, 3, 4, 5]])


class Attention:
    """Two requests of 7 and 4 tokens, their places shuffled over a cache; four heads share two of the keys'."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = [7, 4]
        self.rows = torch.tensor([1, 0])
        self.table = torch.randperm(20, generator=generator)[:14].view(2, 7)
        self.keys, self.values = (torch.randn(20, 2, size, generator=generator) for size in (8, 6))
        self.queries = [torch.randn(length, 4, 8, generator=generator) for length in self.lengths]

    def expected(self, request: int, visible: torch.Tensor) -> torch.Tensor:
        """``[tokens, heads, 6]`` of one request, written out."""
        places = self.table[self.rows[request], : self.lengths[request]]
        keys, values = (cache[places].repeat_interleave(2, dim=1) for cache in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self.queries[request], keys) * 0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def causal(self, request: int) -> torch.Tensor:
        return torch.ones(self.lengths[request], self.lengths[request], dtype=torch.bool).tril()

    def extend(
        self, kernel: Any, new: list[int], tree_mask: torch.Tensor | None = None, **unusual: Any
    ) -> torch.Tensor:
        """The outputs of the last ``new`` tokens of each request, whose keys the cache does not hold."""
        fresh = [
            self.table[row, :length][-count:] for row, length, count in zip(self.rows, self.lengths, new, strict=True)
        ]
        keys, values = self.keys[torch.cat(fresh)], self.values[torch.cat(fresh)]
        cached_keys, cached_values = self.keys.clone(), self.values.clone()
        cached_keys[torch.cat(fresh)], cached_values[torch.cat(fresh)] = float("nan"), float("nan")
        queries = torch.cat([query[-count:] for query, count in zip(self.queries, new, strict=True)])
        output = torch.full((sum(new), 4, 6), float("nan"))
        kernel(
            queries, keys, values, output, cached_keys, cached_values, 1.0, 1.0, self.table, self.rows,
            torch.tensor(self.lengths), torch.tensor(new), torch.tensor([0, new[0]]), max(new), 0.5, 0.0, False,
            unusual.get("window", 0), None, None, tree_mask, unusual.get("causal", True),
        )  # fmt: skip
        return output


@pytest.mark.usefixtures("sgl_kernel")
@pytest.mark.parametrize("new", [[7, 4], [3, 1]])
def test_new_tokens_see_what_came_before_them(new: list[int]) -> None:
    attention = Attention()
    output = attention.extend(torch.ops.sgl_kernel.extend_attention_cpu, new)
    expected = [attention.expected(request, attention.causal(request))[-new[request] :] for request in (0, 1)]
    torch.testing.assert_close(output, torch.cat(expected))


@pytest.mark.usefixtures("sgl_kernel")
def test_drafts_see_their_own_branch() -> None:
    attention, trees = Attention(), torch.stack([ANCESTORS[:3, :3], torch.eye(3, dtype=torch.bool)])
    output = attention.extend(torch.ops.sgl_kernel.extend_attention_cpu, [3, 3], trees.flatten())
    expected = []
    for request in (0, 1):
        visible = attention.causal(request)
        visible[-3:, -3:] = trees[request]
        expected.append(attention.expected(request, visible)[-3:])
    torch.testing.assert_close(output, torch.cat(expected))


@pytest.mark.usefixtures("sgl_kernel")
def test_one_new_token_a_request_enters_the_cache_and_sees_all_of_it() -> None:
    attention = Attention()
    places = torch.stack([attention.table[1, 6], attention.table[0, 3]])
    keys, values = attention.keys.clone(), attention.values.clone()
    keys[places], values[places] = float("nan"), float("nan")
    output = torch.full((2, 4, 6), float("nan"))
    torch.ops.sgl_kernel.decode_attention_cpu(
        torch.stack([query[-1] for query in attention.queries]), keys, values, 1.0, 1.0, output,
        attention.keys[places], attention.values[places], places, None, attention.table, attention.rows,
        torch.tensor(attention.lengths), 0.5, 0.0, False, 0, None, None,
    )  # fmt: skip
    expected = [attention.expected(request, attention.causal(request))[-1] for request in (0, 1)]
    torch.testing.assert_close(output, torch.stack(expected))
    assert torch.equal(keys, attention.keys)


@pytest.mark.usefixtures("sgl_kernel")
@pytest.mark.parametrize("unusual", [{"window": 3}, {"causal": False}])
def test_attention_that_is_not_written_is_refused(unusual: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="plain causal attention"):
        Attention().extend(torch.ops.sgl_kernel.extend_attention_cpu, [1, 1], **unusual)
