"""Vectors of texts by a model in any layout are those of transformers' hidden states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible, UsageError
from megaconv.model.fields import changed
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.model import EngineModel
from megatron_lite.models.purposes import refuse_embedding
from megatron_lite.objectives.scored_model import SCORED
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions
from tests.trainer.parallel.small import MODELS as SMALL
from tests.trainer.parallel.worlds import World
from tests.trainer.vectors import LENGTH, MODELS, by_transformers, save

pytestmark = pytest.mark.oracle
TEXTS = ("w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w12 w13", "w1")
ROWS = [[1, *(int(word[1:]) + 4 for word in text.split()), 2] for text in TEXTS]


def run(rank: int, directory: Path, tp: int, pp: int, dp: int, ep: int, pooling: str) -> Tensor | None:  # fmt: skip
    """The vectors of ROWS, on rank 0."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    layers = split_layers(config.layer_count, pp, 1, LayerSplit())
    has_experts = config.experts.count > 0
    layout = Layout(tp, pp, 1, ep, stage_layers=layers)
    grid = make_grid(layout, dp, torch.device("cpu"), experts=has_experts)
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    load_weights(engine, checkpoint.tensors)
    model = EngineModel(engine, 1, LENGTH)
    if rank:
        model.follow()
        grid.close()
        return None
    found = model.embed(ROWS, pooling)
    # A vector doesn't depend on the rows beside it.
    assert torch.allclose(model.embed(ROWS[1:2], pooling), found[1:2], atol=1e-6)
    with pytest.raises(UsageError, match="outside the model's vocabulary"):
        model.embed([[1, 999]], pooling)
    model.close()
    grid.close()
    return found


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_one_process_makes_the_vectors_of_transformers(pooling: str, saved: Path) -> None:
    found = run(0, saved, 1, 1, 1, 1, pooling)
    assert found is not None
    assert torch.allclose(found, by_transformers(saved, TEXTS, pooling), atol=1e-5)


LAYOUTS = [
    ("llama", (2, 2, 1, 1), "mean"),
    ("mixtral", (1, 1, 2, 2), "last"),
    ("qwen3", (1, 2, 2, 1), "mean"),
    ("mixtral", (2, 1, 2, 2), "mean"),
    ("llama", (2, 1, 1, 1), "last"),
]


@pytest.mark.parametrize(("name", "sizes", "pooling"), LAYOUTS[:2])
def test_layouts_make_the_vectors_of_transformers(
    name: str, sizes: tuple[int, int, int, int], pooling: str, tmp_path: Path, world: World
) -> None:
    require_layout(name, sizes, pooling, tmp_path, world)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "pooling"), LAYOUTS[2:])
def test_further_layouts_make_the_vectors_of_transformers(
    name: str, sizes: tuple[int, int, int, int], pooling: str, tmp_path: Path, world: World
) -> None:
    require_layout(name, sizes, pooling, tmp_path, world)


def require_layout(
    name: str, sizes: tuple[int, int, int, int], pooling: str, directory: Path, world: World
) -> None:
    save(directory, name)
    tp, pp, dp, _ = sizes
    found = world.run(tp * pp * dp, run, directory, *sizes, pooling)[0]
    assert torch.allclose(found, by_transformers(directory, TEXTS, pooling), atol=1e-5)


def test_a_loaded_model_with_a_head_of_scores_makes_no_vectors() -> None:
    config = changed(SMALL["llama"], SCORED)
    layers = split_layers(config.layer_count, 1, 1, LayerSplit())
    grid = make_grid(Layout(1, 1, stage_layers=layers), 1, torch.device("cpu"), experts=False)
    engine = Engine(config, grid, ModelOptions(dtype="float32", trains=False), None)
    model = EngineModel(engine, 1, LENGTH)
    with pytest.raises(NotExpressible, match="this model: the model has a head of scores"):
        model.embed(ROWS, "last")
    model.close()
    grid.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scored", "the model has a head of scores"),
        ("bert", "is a bert; a biencoder or a decoder was expected"),
        ("projected", "has a matrix between its last norm and its head"),
    ],
)
def test_models_without_vectors_are_refused(name: str, message: str) -> None:
    llama = SMALL["llama"]
    models = {
        "scored": changed(llama, SCORED),
        "bert": replace(llama, family="bert"),
        "projected": changed(llama, {"head.projection": "gelu"}),
    }
    refuse_embedding(llama, "place")
    with pytest.raises(NotExpressible, match=f"place: .*{message}"):
        refuse_embedding(models[name], "place")
