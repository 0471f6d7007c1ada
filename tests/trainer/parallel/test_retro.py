"""Retro: logits, gradients and six steps of Megatron core 0.15.3's own model and training, at any layout."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from formats.tensor import matrix_shape
from megaconv.engine.stream import as_lazy
from megaconv.errors import CheckpointError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE, CORE_LOCAL
from megaconv.model.natives import native_tensors
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.build_plan import make_plan
from megatron_lite.models.retro import OF_RETRIEVAL
from megatron_lite.parallel.grid import make_grid
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import (
    ModelOptions,
    OptimizerOptions,
    Recompute,
    RetrievalOptions,
)
from tests.trainer.parallel.test_encoder_decoders import canonical
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[1] / "fixtures"
NONE = Recompute()
MODELS = ("learned", "rope")


@cache
def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"retro-{name}" / "expected.json").read_text())
    return found


def array(name: str, file: str) -> np.ndarray:
    return np.load(FIXTURES / f"retro-{name}" / f"{file}.npy")


def config_of(name: str) -> ModelConfig:
    """The model of a fixture, from core's own fields."""
    model = expected(name)["model"]
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    learned = model["position"] == "learned_absolute"
    return from_fields(
        "retro",
        {
            "layers.count": model["num_layers"], "hidden": hidden, "attention.heads": heads, "attention.kv_heads": heads,
            "attention.head_dim": hidden // heads, "mlp.ffn": model["ffn_hidden_size"], "vocab": 96, "max_positions": 32,
            "norm.kind": model["normalization"], "norm.epsilon": model["layernorm_epsilon"], "norm.final": model["final_layernorm"],
            "mlp.activation": "silu" if model["gated_silu"] else "gelu", "mlp.gated": model["gated_silu"],
            "mlp.bias": model["bias"], "attention.qkv_bias": model["bias"], "attention.o_bias": model["bias"],
            "positions.kind": "learned" if learned else "rope", "positions.rotary_percent": model["rotary_percent"],
            "tie_embeddings": model["tied"], "retrieval.layers": model["retro_encoder_num_layers"],
            "retrieval.chunk": model["retro_chunk_length"], "retrieval.neighbors": model["retro_num_neighbors"],
            "retrieval.chunks": model["retro_num_retrieved_chunks"],
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str = "learned"
    tp: int = 1
    dp: int = 1
    distributed: bool = False
    recompute: Recompute = NONE
    gate: float = 1.0
    clip: float = 1.0

    @property
    def world(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        words = [f"{axis}{getattr(self, axis)}" for axis in ("tp", "dp") if getattr(self, axis) > 1]
        words += ["zero" if self.distributed else "", self.recompute.granularity or ""]
        return " ".join(filter(None, (self.name, *words)))


def make_engine(case: Case, *, trains: bool = True) -> Engine:
    config, training = config_of(case.name), expected(case.name)["training"]
    options = ModelOptions(
        "float32",
        vocab_divisor=1,
        recompute=case.recompute,
        retrieval=RetrievalOptions(case.gate),
    )
    optimizer = OptimizerOptions(
        betas=(training["beta1"], training["beta2"]),
        eps=training["eps"],
        clip_grad=case.clip,
        distributed=case.distributed,
        bucket_elements=5000,
    )
    layout = Layout(case.tp, stage_layers=(config.layer_count,))
    grid = make_grid(layout, case.dp, torch.device("cpu"))
    engine = Engine(config, grid, options, optimizer if trains else None)
    weights = canonical(config, FIXTURES / f"retro-{case.name}" / "weights.safetensors")
    load_weights(engine, {name: as_lazy(array) for name, array in weights.items()})
    return engine


def batch_of(rows: np.ndarray, neighbors: np.ndarray, index: int = 0) -> Microbatch:
    tokens, source = (torch.from_numpy(each.astype(np.int64)) for each in (rows, neighbors))
    return Microbatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(),
        source=source.reshape(-1, source.shape[-1]), index=index,
    )  # fmt: skip


def microbatches(name: str, step: int) -> list[Microbatch]:
    training = expected(name)["training"]
    tokens, neighbors = array(name, "tokens"), array(name, "neighbors")
    first, size = step * training["gbs"], training["mbs"]
    starts = range(first, first + training["gbs"], size)
    return [
        batch_of(tokens[start : start + size], neighbors[start : start + size], index)
        for index, start in enumerate(starts)
    ]


def train(_rank: int, case: Case, steps: int = 6) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    engine, found = make_engine(case), []
    answers = expected(case.name)
    for step in range(steps):
        own = microbatches(case.name, step)[engine.grid.dp_rank :: case.dp]
        report = engine.train_step(own, answers["lr"][step], answers["training"]["wd"])
        found.append((report.loss, report.grad_norm))
    engine.finish()
    engine.grid.close()
    return found


def compare(name: str, found: list[tuple[float, float]]) -> None:
    answers = expected(name)
    losses, norms = zip(*found, strict=True)
    assert losses == pytest.approx(answers["loss"], rel=1e-6)
    assert norms == pytest.approx(answers["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_megatron_cores(name: str) -> None:
    engine = make_engine(Case(name), trains=False)
    found = engine.logits(batch_of(array(name, "tokens")[:2], array(name, "neighbors")[:2]))
    assert found is not None
    answer = array(name, "logits")
    assert np.abs(found.numpy() - answer).max() <= 1e-5 * np.abs(answer).max()


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_chunk_is_the_first_one_where_it_has_neighbors_as_in_megatron_core(
    name: str,
) -> None:
    engine, length = make_engine(Case(name), trains=False), expected(name)["partial_length"]
    tokens, neighbors = array(name, "tokens")[:2, : length + 1], array(name, "neighbors")[:2]
    found = engine.logits(batch_of(tokens, neighbors))
    assert found is not None
    answer = array(name, "logits-partial")
    assert np.abs(found.numpy() - answer).max() <= 1e-5 * np.abs(answer).max()


@pytest.mark.parametrize("name", MODELS)
def test_whole_chunks_count_from_the_start_where_a_part_has_no_neighbors(name: str) -> None:
    """Generation counts chunks as training does: the logits of a beginning are those of the whole text."""
    engine = make_engine(Case(name), trains=False)
    tokens, neighbors = array(name, "tokens")[:2], array(name, "neighbors")[:2]
    whole = engine.logits(batch_of(tokens, neighbors))
    assert whole is not None
    for length in (5, 8, 15, 16, 21, 31):
        found = engine.logits(batch_of(tokens[:, : length + 1], neighbors[:, : length // 8]))
        torch.testing.assert_close(found, whole[:, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", range(4))
def test_the_neighbors_of_a_chunk_are_seen_from_its_last_token_on(chunk: int) -> None:
    engine = make_engine(Case("rope"), trains=False)
    tokens, neighbors = array("rope", "tokens")[:2], array("rope", "neighbors")[:2]
    others = neighbors.copy()
    others[:, chunk] = (others[:, chunk] + 1) % 96
    first, second = (engine.logits(batch_of(tokens, each)) for each in (neighbors, others))
    assert first is not None
    assert second is not None
    differs = (first != second).any(-1).any(0)
    start = (chunk + 1) * 8 - 1
    assert not differs[:start].any()
    assert differs[start]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_first_step_are_megatron_cores(name: str) -> None:
    engine = make_engine(Case(name, clip=0.0))
    engine.train_step(microbatches(name, 0), lr=0.0)
    assert engine.optimizer is not None
    found = {item.name: item.gradient.view(item.shape) for item in engine.optimizer.ranges()}
    answers = load_file(FIXTURES / f"retro-{name}" / "gradients-step1.safetensors")
    config = engine.config
    (chunk,) = engine.grid.layout.chunks()
    named = [
        list(
            native_tensors(
                family("retro").rows, config, naming, engine.grid.layout, 0, chunk, config.vocab
            )
        )
        for naming in (CORE, CORE_LOCAL)
    ]
    for own, theirs in zip(*named, strict=True):
        if own.copy is None:
            whole = answers[theirs.name]
            assert (found[own.name] - whole).abs().max() <= 1e-5 * whole.abs().max(), own.name


ONE_PROCESS = [Case("learned"), Case("rope", recompute=Recompute("full", "uniform", 4))]
RECOMPUTED = [
    Case("rope"), Case("learned", recompute=Recompute("full")), Case("rope", recompute=Recompute("selective")),
    Case("learned", recompute=Recompute("full", "block", 7)), Case("learned", recompute=Recompute("full", "uniform", 4)),
]  # fmt: skip
SOME = [*ONE_PROCESS, *(pytest.param(case, marks=pytest.mark.slow) for case in RECOMPUTED)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_six_steps_of_one_process_are_megatron_cores(case: Case) -> None:
    compare(case.name, train(0, case))


LAYOUTS = [Case("rope", tp=2), Case("learned", dp=2, distributed=True)]
MORE_LAYOUTS = [
    Case("learned", tp=2), Case("rope", dp=2, distributed=True), Case("rope", dp=2), Case("learned", tp=4),
    Case("learned", tp=2, dp=2, distributed=True, recompute=Recompute("full")),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_six_steps_at_a_layout_are_megatron_cores(case: Case, world: World) -> None:
    for found in world.run(case.world, train, case):
        compare(case.name, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_LAYOUTS, ids=str)
def test_six_steps_at_any_layout_are_megatron_cores(case: Case, world: World) -> None:
    for found in world.run(case.world, train, case):
        compare(case.name, found)


def gpt_inside(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith("retriever.") and ".cross" not in name
    }


def trained_once(engine: Engine, batches: list[Microbatch]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, gradient) of each trained parameter."""
    engine.train_step(batches, lr=0.0)
    assert engine.optimizer is not None
    for item in engine.optimizer.ranges():
        yield item.name, item.gradient.clone()


def test_a_gate_of_zero_is_the_gpt_inside_bit_for_bit() -> None:
    """Both have a final norm, as every GPT."""
    config = changed(config_of("learned"), {"norm.final": True})
    weights = canonical_with_norm(config)
    gpt = changed(config, {"retrieval.layers": 0})
    gpt = replace(gpt, family="gpt2")
    tokens, neighbors = array("learned", "tokens")[:2], array("learned", "neighbors")[:2]
    batch = batch_of(tokens, neighbors)
    made = []
    for model, own in ((config, weights), (gpt, gpt_inside(weights))):
        options = ModelOptions("float32", vocab_divisor=1, retrieval=RetrievalOptions(gate=0.0))
        grid = make_grid(Layout(stage_layers=(9,)), 1, torch.device("cpu"))
        engine = Engine(model, grid, options, OptimizerOptions(clip_grad=0.0))
        load_weights(engine, {name: as_lazy(tensor) for name, tensor in own.items()})
        logits = engine.logits(batch)
        made.append((logits, dict(trained_once(engine, [batch]))))
    (ours, gradients), (theirs, of_gpt) = made
    assert torch.equal(ours, theirs)
    assert gradients.keys() == of_gpt.keys()
    assert not any(part in name for name in gradients for part in OF_RETRIEVAL)
    assert all(torch.equal(gradients[name], of_gpt[name]) for name in gradients)


def canonical_with_norm(config: ModelConfig) -> dict[str, np.ndarray]:
    plain = changed(config, {"norm.final": False})
    weights = canonical(plain, FIXTURES / "retro-learned" / "weights.safetensors")
    norm = {
        "final_norm.weight": np.ones(32, np.float32),
        "final_norm.bias": np.zeros(32, np.float32),
    }
    return weights | norm


@pytest.mark.parametrize(
    ("fields", "layout", "sequence", "message"),
    [
        ({}, Layout(pp=3, stage_layers=(3, 3, 3)), False, "pp = 3 is not supported with retrieval"),
        ({}, Layout(2, stage_layers=(9,)), True, "--sequence-parallel is not supported with retrieval"),
        ({"attention.kv_heads": 2}, Layout(stage_layers=(9,)), False, "key/value heads that heads share"),
        ({"experts.count": 4, "experts.ffn": 8, "experts.per_token": 2, "layers.mlp": "experts"}, Layout(stage_layers=(9,)),
         False, "experts can't be combined with retrieval"),
        ({"latent.kv_rank": 8, "latent.rope_dim": 4, "latent.v_dim": 8}, Layout(stage_layers=(9,)),
         False, "latent attention can't be combined with retrieval"),
        ({"layers.count": 5}, Layout(stage_layers=(5,)), False, "layer 6 is the first that does"),
    ],
)  # fmt: skip
def test_a_retro_that_megatron_core_has_not_is_refused(
    fields: dict[str, Any], layout: Layout, sequence: bool, message: str
) -> None:
    ranks = TensorGroup(None, 0, layout.tp, sequence)
    with pytest.raises(CheckpointError, match=message):
        make_plan(changed(config_of("learned"), fields), layout, ModelOptions(), ranks)


def test_every_parameter_has_its_own_gradient_buffer_once() -> None:
    engine = make_engine(Case("learned"))
    names = [info.name for info in engine.infos[0]]
    assert len(names) == len(set(names))
    assert sum(matrix_shape(info.native.shape)[0] > 0 for info in engine.infos[0]) == len(names)
