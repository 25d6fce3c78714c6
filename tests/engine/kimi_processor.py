"""A processor of images for the tiny Kimi-K2.5, as the model's own remote code would bring one: SGLang loads this file
from the model's directory, and the oracle takes its pixels from here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

PATCH = 14
MERGED = 2 * PATCH


def pixels_of(image: Any) -> tuple[torch.Tensor, list[int]]:
    """``[patches, 3, 14, 14]``, row by row, and the grid: frames, rows, columns. The image is cut to whole tokens."""
    array = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 127.5 - 1
    height, width = (side // MERGED * MERGED for side in array.shape[1:])
    patches = array[:, :height, :width].unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return patches.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(), [1, height // PATCH, width // PATCH]


class TinyKimiVision(BaseImageProcessor):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg = {
            "patch_size": PATCH,
            "merge_kernel_size": 2,
            "in_patch_limit": 256,
            "patch_limit_on_one_side": 16,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        width, height = media["image"].size
        return (width // MERGED) * (height // MERGED)


class TinyKimiProcessor(ProcessorMixin):
    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.media_processor = image_processor

    def __call__(self, text: list[str], medias: Any = None, add_special_tokens: bool = True, **_: Any) -> BatchFeature:
        data = dict(self.tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt"))
        if medias:
            pixels, grids = zip(*(pixels_of(media["image"]) for media in medias), strict=True)
            data.update(pixel_values=torch.cat(pixels), grid_thws=torch.tensor(grids))
        return BatchFeature(data)
