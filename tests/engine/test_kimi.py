"""Kimi-K2.5: its language model stands behind a wrapper, and images take up rows of their own."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from engine.captures import assert_equals_run
from engine.kimi import IMAGE_ID, make_kimi
from engine.kimi_processor import pixels_of
from engine.oracle import Oracle
from engine.served import (
    CHUNK,
    Served,
    check_defaults,
    check_each_row_is_taken_once,
    check_layers_and_lengths,
    serving,
)
from sglang_capture.dump import Dump

pytestmark = pytest.mark.engine

MARGIN = 1e-3
"""Of routers, at the prompts here; a tie would be one of 1e-6."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = make_kimi(tmp_path_factory.mktemp("kimi"))
    with serving(directory, "--trust-remote-code", oracle=Oracle(directory, sees=True)) as served:
        yield served


def image(width: int, height: int, seed: int) -> Image.Image:
    """Noise."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def encoded(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


WIDE, SMALL = image(84, 56, 1), image(56, 56, 2)
TOKENS = {id(WIDE): 6, id(SMALL): 4}

EVERYTHING = {"capture_layers": [0, 1, 2, 3, 4, 5], "capture_last_hidden": "both"}


def assert_rows_of(served: Served, dump: Dump, pictures: Sequence[Image.Image]) -> None:
    """One vocabulary id a row, the placeholder's at image rows; all rows, those of images too, as transformers'."""
    ids = dump.input_ids
    assert int((ids == IMAGE_ID).sum()) == sum(TOKENS[id(picture)] for picture in pictures)
    assert int(ids.max()) < served.oracle.vocab_size
    pixels, grids = zip(*(pixels_of(picture) for picture in pictures), strict=True)
    run = served.oracle.run_with(
        ids.tolist(), {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    )
    assert run.router_margin > MARGIN
    assert_equals_run(dump, run, exact=ids != IMAGE_ID)


def generate(served: Served, name: str, body: dict[str, Any], pictures: Sequence[Image.Image]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 2, "temperature": 0, "custom_params": {"capture": name, **EVERYTHING}}
    images = [encoded(picture) for picture in pictures]
    answer: dict[str, Any] = served.server.post(
        "/generate", {**body, "image_data": images, "sampling_params": sampling}
    )
    return answer


def test_text_alone(served: Served) -> None:
    check_defaults(served)
    check_layers_and_lengths(served)
    check_each_row_is_taken_once(served)


def test_an_image_between_ids(served: Served) -> None:
    prompt = [*served.draw(5), IMAGE_ID, *served.draw(7)]
    answer = generate(served, "ids", {"input_ids": prompt}, [WIDE])
    dump = served.server.dump("ids")
    assert answer["meta_info"]["prompt_tokens"] == dump.tokens == 12 + 6
    assert dump.input_ids.tolist() == [*prompt[:5], *[IMAGE_ID] * 6, *prompt[6:]]
    assert_rows_of(served, dump, [WIDE])


def test_two_images_between_text(served: Served) -> None:
    generate(served, "text", {"text": "Look <|media_pad|> at <|media_pad|> these"}, [SMALL, WIDE])
    assert_rows_of(served, served.server.dump("text"), [SMALL, WIDE])


def test_an_image_in_a_chat(served: Served) -> None:
    parts = [
        {"type": "text", "text": "What is this? "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(WIDE)}"}},
        {"type": "text", "text": " Be brief."},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0}
    answer = served.server.post("/v1/chat/completions", {**body, "custom_params": {"capture": "chat", **EVERYTHING}})
    dump = served.server.dump("chat")
    assert answer["usage"]["prompt_tokens"] == dump.tokens
    assert_rows_of(served, dump, [WIDE])


def test_an_image_that_a_chunk_cuts_in_two_and_that_the_cache_holds(served: Served) -> None:
    prompt = [*served.draw(CHUNK - 3), IMAGE_ID, *served.draw(CHUNK), IMAGE_ID]
    first = generate(served, "cut", {"input_ids": prompt}, [WIDE, SMALL])
    again = generate(served, "again", {"input_ids": prompt}, [WIDE, SMALL])
    assert first["output_ids"] == again["output_ids"]
    for name in ("cut", "again"):
        assert_rows_of(served, served.server.dump(name), [WIDE, SMALL])
