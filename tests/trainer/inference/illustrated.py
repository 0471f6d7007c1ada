"""A prompt with two images, and the logits behind it in a layout of ranks."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaconv.model.fields import changed
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.engine import Engine
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.opening_images import open_images
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.slots import Feed
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions

CPU = torch.device("cpu")
PROMPT: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "compare "},
            {"type": "image"},
            {"type": "text", "text": " with "},
            {"type": "image"},
        ],
    }
]
NAMES = ("0.png", "1.png")
FOLLOWING = (72, 105, 33)
"""Tokens behind the prompt."""


def in_layout(
    rank: int, directory: Path, tp: int, pp: int, dp: int, device: torch.device = CPU
) -> list[Tensor] | None:
    """The logits behind the prompt and what follows, in the last slot."""
    start = open_weights(str(directory / "hf"))
    config = changed(start.config, {"dtype": "float32"})
    layers = split_layers(config.layer_count, pp, 1, LayerSplit())
    grid = make_grid(Layout(tp, pp, stage_layers=layers), dp, device, experts=False)
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    load_weights(engine, {key.name: tensor for key, tensor in start.tensors.items()})
    model = EngineModel(engine, 2, 512)
    tokenizer = HuggingFaceTokenizer(str(directory / "hf"))
    given = Namespace(image_encoder=None, load=str(directory / "hf"), draft_tokens=0)
    images = open_images(given, model, tokenizer)
    found = None
    if rank:
        model.follow()
    else:
        files = [ImageFile(directory / "data" / name) for name in NAMES]
        pictures = [images.add(file, several=True) for file in files]
        prompt = encode_chat(tokenizer, PROMPT, pictures=pictures)
        slot, end = model.slots - 1, len(prompt)
        found = [model.extend([Feed(0, 0, (72, 73)), Feed(slot, 0, prompt)])[1]]
        for place, each in enumerate(FOLLOWING, end):
            found += model.extend([Feed(slot, place, (each,))])
        model.close()
    grid.close()
    return found
