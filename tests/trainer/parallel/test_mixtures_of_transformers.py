"""Mixtures of experts: transformers and we compute the same logits, loss and gradients from the same files."""

from pathlib import Path
from typing import Any

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
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

pytestmark = pytest.mark.oracle
TOLERANCE, VOCAB = 2e-5, 99
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "moe_intermediate_size": 24,
    "intermediate_size": 40,
    "decoder_sparse_step": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "intermediate_size": 24, "sliding_window": None}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, some layers dense": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "mlp_only_layers": [0]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Their gradients are saved as if they were a model's weights, so that the converter finds out which is which."""
    import transformers

    kind, words = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **words})
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path / "weights")
    tokens = torch.randint(VOCAB, (2, 33), generator=torch.Generator().manual_seed(4))
    logits = theirs(input_ids=tokens[:, :-1]).logits
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    loss.backward()
    for parameter in theirs.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = open_checkpoint(tmp_path / "gradients").tensors

    source = open_checkpoint(tmp_path / "weights")
    grid = make_grid(Layout(stage_layers=(2,)), 1, torch.device("cpu"), experts=True)
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
