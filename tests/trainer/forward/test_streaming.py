"""Weights that are read when they are used give the logits of transformers, and those of a model in memory, bit for bit or nearly."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.tensor import Box, Bytes, LazyTensor, Shape
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.forward.comparison import compute
from megatron_lite.forward.opening import open_streamed
from megatron_lite.forward.rows import batches, built_in_tokens
from megatron_lite.models.moe.router import Router
from megatron_lite.models.trainable import TRAINED, rotated_width
from megatron_lite.parallel.grid import Grid
from megatron_lite.settings.options import ModelOptions
from tests.config_models import FAMILIES, raw_config, raw_gpt2, read
from tests.conftest import FIXTURES
from tests.transformers_oracle import (
    BEYOND_MEGATRON,
    MIXTURES,
    NAMED,
    VARIANTS,
    create,
    family_of,
    load,
)

TOLERANCE = 2e-5
SMALL = 8 * 4096
"""Memory of which a block of rows takes 4 KiB: matrices are read in several blocks."""
CPU = torch.device("cpu")
COMPUTED = {
    name: variant
    for name, variant in {**VARIANTS, **MIXTURES, **NAMED, **BEYOND_MEGATRON}.items()
    if family_of(variant) in TRAINED
}
QUICK = ("llama", "deepseek_v3", "nemotron_h, experts")
QUICK_FAMILIES = ("gemma2", "gpt_oss", "llama4", "qwen3_next")


def streamed(config: ModelConfig, tensors: dict[str, LazyTensor]) -> Engine:
    return open_streamed(
        "model", config, tensors, "float32", CPU, SMALL, min(32, config.max_positions)
    )


def weights_of(directory: Path) -> tuple[ModelConfig, dict[str, LazyTensor]]:
    start = open_weights(str(directory))
    return start.config, {key.name: tensor for key, tensor in start.tensors.items()}


def in_float64(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits. Some classes make tensors of torch's default dtype, in which the least float64 is no number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        logits: torch.Tensor = model.double()(input_ids=tokens).logits
    finally:
        torch.set_default_dtype(before)
    return logits


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMPUTED],
)
@pytest.mark.oracle
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    create(COMPUTED[name], tmp_path)
    engine = streamed(*weights_of(tmp_path))
    (batch,) = batches(engine.config, [built_in_tokens(engine.config.vocab, 32)], 1)
    with torch.no_grad():
        found, model = engine.logits(batch), load(tmp_path)
        model.config._experts_implementation = "eager"
        rounded = model(input_ids=batch.tokens).logits
        exact = in_float64(model, batch.tokens)
    assert found is not None
    largest = exact.abs().max()
    strays, theirs = (float((each - exact).abs().max() / largest) for each in (found, rounded))
    assert strays <= max(TOLERANCE, 2 * theirs)


def config_of(family: str) -> ModelConfig:
    if family == "gpt2":
        return read(raw_gpt2())
    config = read(raw_config(family))
    if rotated_width(config) % 2:
        rotates = {"rotary_dim": 4} if family == "minimax_m2" else {"head_dim": 16}
        config = read(raw_config(family, **rotates))
    return config


def in_memory(config: ModelConfig, tensors: dict[str, LazyTensor]) -> Engine:
    layout = Layout(stage_layers=(config.layer_count,))
    options = ModelOptions(dtype="float32", trains=False, vocab_divisor=1)
    engine = Engine(changed(config, {"dtype": "float32"}), Grid(layout, 1, 0, CPU), options, None)
    load_weights(engine, tensors)
    return engine


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_FAMILIES else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
        if name in TRAINED
    ],
)
def test_every_family_computes_the_same_with_and_without_its_weights_in_memory(name: str) -> None:
    config = config_of(name)
    tensors = initial_weights(config, 0.2, 7)
    engines = [in_memory(config, tensors), streamed(config, tensors)]
    (batch,) = batches(config, [built_in_tokens(config.vocab, 8)], 1)
    found = compute(engines, [batch], logits_at_once=3)
    far = {each.name: each.relative for each in found.differences.values()}
    assert set(far) > {"embedding", "layer 0", "logits"}
    assert {state: value for state, value in far.items() if not value < TOLERANCE} == {}
    ours, theirs = (losses.perplexity for losses in found.losses)
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("fixture", "states"),
    [
        ("core-bert-tp2pp2/checkpoint", {"layer 1", "pooled text", "scores of texts", "logits"}),
        ("core-t5-tp2pp1/checkpoint", {"encoder layer 0", "layer 0", "logits"}),
        ("biencoder-legacy-shared", {"query layer 1", "query embeddings of texts"}),
        ("biencoder-legacy-separate", {"context layer 1", "context embeddings of texts"}),
    ],
)
def test_encoders_too(fixture: str, states: set[str]) -> None:
    config, tensors = weights_of(FIXTURES / fixture)
    engines = [in_memory(config, tensors), streamed(config, tensors)]
    (batch,) = batches(config, [built_in_tokens(config.vocab, 8)], 1)
    found = compute(engines, [batch], logits_at_once=3)
    assert states <= set(found.differences)
    assert max(each.relative for each in found.differences.values()) < TOLERANCE


@dataclass(frozen=True)
class Watched:
    """A lazy tensor that notes that it is read."""

    name: str
    inner: LazyTensor
    read: set[str]

    @property
    def shape(self) -> Shape:
        return self.inner.shape

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read.add(self.name)
        self.inner.read_into(box, out)


def test_only_the_experts_that_tokens_choose_are_read() -> None:
    config = config_of("deepseek_v3")
    tensors = initial_weights(config, 0.2, 7)
    read: set[str] = set()
    watched: dict[str, LazyTensor] = {
        name: Watched(name, tensor, read) for name, tensor in tensors.items()
    }
    chosen: set[tuple[int, int]] = set()
    engine = streamed(config, watched)
    for module in engine.chunks[0].modules():
        if isinstance(module, Router):
            module.register_forward_hook(
                lambda router, _, made: chosen.update(
                    (router.layer, expert) for expert in made[1].flatten().tolist()
                )
            )
    (batch,) = batches(config, [built_in_tokens(config.vocab, 2)], 1)
    compute([engine], [batch], logits_at_once=1)
    of_experts = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.")
    found = {match for match in map(of_experts.search, read) if match is not None}
    assert {(int(match[1]), int(match[2])) for match in found} == chosen
    assert 0 < len(chosen) < 2 * config.experts.count
    unread = [name for name in tensors if name not in read and not name.startswith("mtp.")]
    assert all(of_experts.search(name) for name in unread)
