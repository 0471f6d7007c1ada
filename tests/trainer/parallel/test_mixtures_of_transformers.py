"""Mixtures of experts: transformers and we compute the same logits, loss and gradients from the same files."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from formats.tensor import matrix_shape
from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights, read_rows
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.trainable import TRAINED
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from tests.trainer.parallel.worlds import World
from tests.transformers_oracle import (
    BEYOND_MEGATRON,
    LAYERS,
    MIXTURES,
    NAMED,
    RELATIVES,
    VOCAB,
    Variant,
    create,
    family_of,
    load,
)

pytestmark = pytest.mark.oracle
TOLERANCE = 2e-5
VARIANTS = MIXTURES | NAMED | BEYOND_MEGATRON | RELATIVES
HYBRID = (
    *("bamba", "falcon_h1", "granite_moe_hybrid", "kimi_linear", "nemotron_h"),
    *("lara_mini", "olmo_hybrid", "qwen3_next", "qwen3_5_moe"),
)
"""Families with states; test_hybrids_of_transformers.py has them."""
OF_LAYER_INPUTS = "gemma4_text, layer inputs"
OF_GRADIENTS = {OF_LAYER_INPUTS: 1e-4}
"""Models whose float32 gradients stray further. transformers' own are 4e-5 from its float64 gradients, and ours 1e-5."""
TOKENS = torch.randint(7, VOCAB, (2, 33), generator=torch.Generator().manual_seed(4))


def compute(variant: Variant, directory: Path) -> None:
    """Save the results of transformers for a new model: weights, gradients, logits and loss.

    Gradients are saved as if they were a model's weights, so that the converter finds out which is which.
    """
    create(variant, directory / "weights")
    model = load(directory / "weights")
    logits = model(input_ids=TOKENS[:, :-1]).logits
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), TOKENS[:, 1:].reshape(-1))
    loss.backward()
    torch.save((logits.detach(), loss.item()), directory / "answers")
    for key, parameter in model.named_parameters():
        if ".indexer." in key:
            assert parameter.grad is None, "an indexer chooses, which has no gradient"
            parameter.data.zero_()
        elif not key.endswith(("e_score_correction_bias", "mlp.expert_bias")):
            assert parameter.grad is not None
            parameter.data = parameter.grad
    model.save_pretrained(directory / "gradients")


def compare(
    _rank: int,
    directory: Path,
    layout: Layout,
    family: str | None = None,
    *,
    of_gradients: float = TOLERANCE,
    sequence_parallel: bool = True,
) -> None:
    """Compare on each rank. A gradient of a tensor that several ranks hold is whole on each of them.

    family: computes the model in place of the family of the files.
    """
    logits, loss = torch.load(directory / "answers")
    gradients = open_checkpoint(directory / "gradients").tensors
    source = open_checkpoint(directory / "weights")
    config = replace(source.config, family=family or source.config.family)
    grid = make_grid(layout, 1, torch.device("cpu"), experts=config.experts.count > 0)
    options = ModelOptions("float32", sequence_parallel=layout.tp > 1 and sequence_parallel)
    engine = Engine(config, grid, options, OptimizerOptions(clip_grad=0))
    load_weights(engine, source.tensors)
    batch = Microbatch(TOKENS[:, :-1], TOKENS[:, 1:])
    ours = engine.logits(batch)
    if ours is not None:
        assert (ours - logits).abs().max() <= TOLERANCE * logits.abs().max()
    assert engine.train_step([batch], lr=0.0).loss == pytest.approx(loss, rel=TOLERANCE)
    assert engine.optimizer is not None
    for item in engine.optimizer.ranges():
        found = item.gradient.view(matrix_shape(item.shape))
        for part, regions in item.info.native.parts.items():
            for region in regions:
                expected = read_rows(gradients[part], region, 0, region.box.rows).numpy()
                own = found[region.row : region.row + region.box.rows].numpy()
                # Without rope, a bias of keys adds the same to all scores of a query: its gradient is rounding alone.
                is_rounding = part.endswith("attn.k.bias") and not config.has("rope")
                least = 1e-2 if is_rounding else 1e-4
                assert np.abs(own - expected).max() <= of_gradients * max(
                    np.abs(expected).max(), least
                ), part
    engine.finish()
    grid.close()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, variant in VARIANTS.items()
        if family_of(variant) in TRAINED and family_of(variant) not in HYBRID
    ],
)
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    compute(VARIANTS[name], tmp_path)
    tolerance = OF_GRADIENTS.get(name, TOLERANCE)
    compare(0, tmp_path, Layout(stage_layers=(LAYERS,)), of_gradients=tolerance)


@pytest.mark.parametrize("family", RELATIVES)
def test_a_family_without_a_class_computes_what_its_relative_does(
    family: str, tmp_path: Path
) -> None:
    compute(VARIANTS[family], tmp_path)
    compare(0, tmp_path, Layout(stage_layers=(LAYERS,)), family)


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", RELATIVES)
def test_such_a_family_computes_the_same_at_other_layouts(
    family: str, tp: int, tmp_path: Path, world: World
) -> None:
    experts = 1 if family == "mimo" else 2
    compute(VARIANTS[family], tmp_path)
    layout = Layout(tp, 1, 1, experts, stage_layers=(LAYERS,))
    world.run(
        2, compare, tmp_path, layout if tp == 2 else Layout(1, 2, stage_layers=(1, 3)), family
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt_oss", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("deepseek_v3", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("olmoe", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("minimax_m2", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("ernie4_5_moe", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("exaone_moe", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("deepseek_v32", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("glm_moe_dsa", Layout(1, 2, 1, 1, stage_layers=(1, 3))),
        ("llama4, norms of q and k", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("llama4, short chunks", Layout(1, 2, 1, 1, stage_layers=(1, 3))),
        ("gemma4_unified_text", Layout(2, 1, stage_layers=(LAYERS,))),
        ("apertus", Layout(2, 2, stage_layers=(1, 3))),
        ("gemma4_text, experts", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        (OF_LAYER_INPUTS, Layout(1, 2, stage_layers=(3, 1))),
        ("mimo_v2_flash", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("diffllama", Layout(2, 2, stage_layers=(1, 3))),
        ("nemotron_nas", Layout(2, 2, stage_layers=(1, 3))),
        ("laguna", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("step3p5", Layout(2, 1, 1, 2, stage_layers=(LAYERS,))),
        ("lfm3", Layout(2, 1, stage_layers=(LAYERS,))),
        ("modernbert_decoder, biases", Layout(2, 2, stage_layers=(1, 3))),
        pytest.param("lfm3", Layout(2, 2, stage_layers=(1, 3)), marks=pytest.mark.slow),
        pytest.param(OF_LAYER_INPUTS, Layout(2, 2, stage_layers=(1, 3)), marks=pytest.mark.slow),
        pytest.param(
            "gemma4_unified_text, shared keys and values",
            Layout(2, 2, stage_layers=(2, 2)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gemma4_text, keys as values", Layout(2, 2, stage_layers=(1, 3)), marks=pytest.mark.slow
        ),
        *(
            pytest.param(name, Layout(2, 2, 1, 2, stage_layers=(1, 3)), marks=pytest.mark.slow)
            for name in (
                *("olmoe", "minimax_m2", "ernie4_5_moe", "exaone_moe"),
                *("deepseek_v32, yarn", "glm_moe_dsa", "llama4, short chunks"),
                *("gemma4_text, experts", "mimo_v2_flash", "laguna, a gate of each element"),
                "step3p5",
            )
        ),
        *(
            pytest.param(name, Layout(2, 1, 1, 2, stage_layers=(LAYERS,)), marks=pytest.mark.slow)
            for name in (
                "flex_olmo",
                "hunyuan_v1_moe",
                "granite_moe",
                "granite_moe_shared",
                "granite_moe_swa",
                "afmoe",
                "beam",
                "axk1",
                "flint",
                "kolibri1",
                "aria_text",
                "cohere2_moe",
                "dbrx",
            )
        ),
        *(
            pytest.param(name, Layout(2, 1, stage_layers=(LAYERS,)), marks=pytest.mark.slow)
            for name in (
                *(
                    "phi",
                    "falcon, two norms",
                    "cohere, norms of q and k",
                    "cohere2",
                    "gptj",
                    "codegen",
                ),
                *(
                    "olmo, limits",
                    "nanochat",
                    "hunyuan_v1_dense",
                    "granite_swa",
                    "persimmon",
                    "minicpm3",
                ),
                *(
                    "bloom",
                    "mpt",
                    "opt",
                    "gpt_neo",
                    "gpt_bigcode, as many kv heads as heads",
                    "xglm",
                    "ctrl",
                ),
                *("gpt_neox_japanese", "bitnet", "biogpt", "openai_gpt"),
            )
        ),
        pytest.param(
            "deepseek_v2", Layout(2, 2, 1, 2, stage_layers=(1, 3)), marks=pytest.mark.slow
        ),
        pytest.param("glm4_moe", Layout(2, 2, 1, 2, stage_layers=(1, 3)), marks=pytest.mark.slow),
        pytest.param("gpt_oss", Layout(2, 2, 1, 1, stage_layers=(1, 3)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_layouts_compute_the_same(
    name: str, layout: Layout, tmp_path: Path, world: World
) -> None:
    compute(VARIANTS[name], tmp_path)
    run = partial(compare, of_gradients=OF_GRADIENTS.get(name, TOLERANCE))
    world.run(layout.tp * layout.pp, run, tmp_path, layout)
