"""Weights of a model at any layout come back as the file that they were read from has them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.inference.models import tiny
from tests.trainer.parallel.worlds import World

pytestmark = pytest.mark.oracle


def gathered(
    rank: int, directory: Path, tp: int, pp: int, dp: int, ep: int
) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    layout = Layout(
        tp, pp, 1, ep, stage_layers=split_layers(config.layer_count, pp, 1, LayerSplit())
    )
    grid = make_grid(layout, dp, torch.device("cpu"), experts=config.experts.count > 0)
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    load_weights(engine, checkpoint.tensors)
    found = dict(hugging_face_tensors(engine))
    grid.close()
    return found


@pytest.mark.parametrize(
    ("kind", "settings", "layout"),
    [
        ("qwen3", {"head_dim": 16}, (2, 2, 1, 1)),
        ("gpt2", {}, (2, 1, 1, 1)),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, (1, 1, 2, 2)),
    ],
)
def test_tensors_are_those_of_the_file(
    kind: str,
    settings: dict[str, Any],
    layout: tuple[int, int, int, int],
    tmp_path: Path,
    world: World,
) -> None:
    from safetensors.torch import load_file

    tiny(kind, **settings).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for found in world.run(layout[0] * layout[1] * layout[2], gathered, tmp_path, *layout):
        assert set(found) == set(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
