"""Another order in every epoch, in which what lies together on the disk is read together, and ahead of the trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils.data import Sampler

from sglang_capture.shards.reader import CaptureDataset

Item = TypeVar("Item")


class BlockShuffle(Sampler[int]):
    """Shuffles a :class:`CaptureDataset` by blocks, and reads ahead of the trainer on a thread.

    The dataset is cut into blocks of neighbours. They come in random order, a few at a time, and the samples of these
    few are mixed. So a dataset larger than the memory is read in a few places at once, and each page of it once an
    epoch.

    Every iteration is the next epoch; :meth:`set_epoch` says which one comes next. The order depends on the dataset,
    the arguments and the epoch alone.

    Args:
        dataset: its own samples (those of its rank) are shuffled.
        block_size: samples of a block.
        mixed: blocks whose samples are mixed.
        prefetch: samples that are read before they are asked for; with 0 there is no thread. Give 0 to a ``DataLoader``
            with workers, which read ahead themselves.
        seed: of the order.

    Raises:
        ValueError: ``block_size`` or ``mixed`` is below 1, or ``prefetch`` below 0.
    """

    def __init__(
        self, dataset: CaptureDataset, *, block_size: int = 16, mixed: int = 8, prefetch: int = 2, seed: int = 0
    ) -> None:
        if block_size < 1 or mixed < 1 or prefetch < 0:
            raise ValueError(
                f"block_size and mixed must be at least 1 and prefetch at least 0; found block_size {block_size}, "
                f"mixed {mixed}, prefetch {prefetch}"
            )
        self._dataset = dataset
        self._block_size, self._mixed, self._prefetch, self._seed = block_size, mixed, prefetch, seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        self._epoch += 1
        if not self._prefetch:
            yield from order
            return
        ahead = deque[Future[None]]()
        with ThreadPoolExecutor(1, "sglang-capture-prefetch") as reader:
            try:
                for place, index in enumerate(order):
                    for later in order[place + len(ahead) : place + 1 + self._prefetch]:
                        ahead.append(reader.submit(self._dataset.prefetch, later))
                    ahead.popleft().result()  # two that read one sample at once take longer than one
                    yield index
            finally:  # an epoch may be left in the middle
                for future in ahead:
                    future.cancel()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``, for a run that goes on where another ended."""
        self._epoch = epoch

    def _order(self) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)

        def shuffled(items: Sequence[Item]) -> list[Item]:
            return [items[number] for number in torch.randperm(len(items), generator=generator).tolist()]

        samples = range(len(self))
        begins = shuffled(range(0, len(samples), self._block_size))
        order: list[int] = []
        for first in range(0, len(begins), self._mixed):
            mixed = begins[first : first + self._mixed]
            order += shuffled([index for begin in mixed for index in samples[begin : begin + self._block_size]])
        return order
