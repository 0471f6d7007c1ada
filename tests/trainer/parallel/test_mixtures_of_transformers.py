"""Mixtures of experts: transformers and we compute the same logits, loss and gradients from the same files."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from formats.tensor import matrix_shape
from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights, read
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.plan import TRAINED
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions
from tests.transformers_oracle import MIXTURES, VOCAB, create, load

pytestmark = pytest.mark.oracle
TOLERANCE = 2e-5


@pytest.mark.parametrize("name", [name for name, variant in MIXTURES.items() if variant.model_type in TRAINED])
def test_logits_loss_and_every_gradient_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Their gradients are saved as if they were a model's weights, so that the converter finds out which is which."""
    create(MIXTURES[name], tmp_path / "weights")
    theirs = load(tmp_path / "weights")
    tokens = torch.randint(7, VOCAB, (2, 33), generator=torch.Generator().manual_seed(4))
    logits = theirs(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    loss.backward()
    for parameter in theirs.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = open_checkpoint(tmp_path / "gradients").tensors

    source = open_checkpoint(tmp_path / "weights")
    grid = make_grid(Layout(stage_layers=(source.config.layer_count,)), 1, torch.device("cpu"), experts=True)
    engine = Engine(source.config, grid, ModelOptions("float32"), OptimizerOptions(clip_grad=0))
    load_weights(engine, source.tensors)
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:])
    ours = engine.logits(batch)
    assert ours is not None
    assert (ours - logits).abs().max() <= TOLERANCE * logits.abs().max()
    assert engine.train_step([batch], lr=0.0).loss == pytest.approx(loss.item(), rel=TOLERANCE)
    assert engine.optimizer is not None
    for item in engine.optimizer.ranges():
        found = item.gradient.view(matrix_shape(item.shape))
        for part, regions in item.info.native.parts.items():
            for region in regions:
                expected = read(gradients[part], region.box)
                own = found[region.row : region.row + region.box.rows]
                assert np.abs(own - expected).max() <= TOLERANCE * max(float(expected.abs().max()), 1e-4), part
