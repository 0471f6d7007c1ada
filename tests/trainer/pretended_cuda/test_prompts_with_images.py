"""Prompts with images on a pretended GPU have the logits of a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.images.kinds import Joint
from megatron_lite.data.images.written import Grid, Written
from megatron_lite.engine import Engine
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.image_tokens import tokens_of
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.shown_images import ShownImages, Traits
from megatron_lite.inference.slots import Feed
from megatron_lite.models.trainable import rotated_width
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.parallel.small import MODELS
from tests.trainer.pretended_cuda.device import GPU, PretendedGpu
from tests.trainer.pretended_cuda.guarded_processes import PretendedWorld

CPU = torch.device("cpu")
GRIDS = (Grid(1, 2, 3), Grid(1, 2, 2))
PROMPT = (5, 9, *tokens_of(0, 6), 11, 12, *tokens_of(1, 4), 30)


class SmallGallery:
    """Images of random vectors."""

    def __init__(self, hidden: int, layers: int, device: torch.device) -> None:
        torch.manual_seed(3)
        vectors = [torch.randn(layers, grid.tokens, hidden) for grid in GRIDS]
        self._pictures = [
            Picture(
                ImageFile(b""),
                number,
                Written("", grid),
                each.to(device),
                is_whole=False,
                token=0,
                placeholder="",
            )
            for number, (grid, each) in enumerate(zip(GRIDS, vectors, strict=True))
        ]

    def picture(self, number: int) -> Picture:
        return self._pictures[number]


def logits(device: torch.device, joint: Joint) -> list[Tensor]:
    """The logits behind the prompt in two parts, and behind two more tokens, beside a row without images."""
    config = MODELS["qwen3"]
    grid = make_grid(Layout(stage_layers=(config.layer_count,)), 1, device)
    engine = Engine(
        config, grid, ModelOptions(dtype="float32", trains=False, vocab_divisor=4), None
    )
    init_weights(engine, std=0.3, seed=5)
    model = EngineModel(engine, 2, 64)
    gallery: Any = SmallGallery(config.hidden, 2, device)
    pairs = rotated_width(config) // 2
    axes = (torch.arange(pairs) % 3).to(device)
    model.images = ShownImages(gallery, engine, model.length, Traits(axes, 0, joint))
    found = [model.extend([Feed(0, 0, PROMPT[:8]), Feed(1, 0, (5, 6))])]
    found.append(model.extend([Feed(0, 8, PROMPT[8:]), Feed(1, 2, (7,))]))
    found += [model.extend([Feed(0, len(PROMPT) + n, (40 + n,))]) for n in range(2)]
    return found


def _on_both(rank: int, joint: Joint) -> tuple[list[Tensor], list[Tensor]]:
    on_cpu = logits(CPU, joint)
    with PretendedGpu():
        return on_cpu, logits(GPU, joint)


@pytest.mark.parametrize("joint", Joint)
def test_prompts_with_images_are_read_as_on_a_cpu(gpu_world: PretendedWorld, joint: Joint) -> None:
    ((on_cpu, on_gpu),) = gpu_world.run(1, _on_both, joint)
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
