"""BERT: ten steps of Megatron core's own model on its own samples, at any layout (fixtures/bert, fixtures/masked)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import init_weights, load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import SWAPPED, Bert
from megatron_lite.models.build_plan import make_plan
from megatron_lite.parallel.grid import make_grid
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.test_mixtures import canonical
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHECKPOINTS = Path(__file__).parents[2] / "fixtures"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "bert" / "expected.json").read_text())
CONFIG = from_fields(
    "bert",
    {
        "layers.count": 2, "hidden": 32, "attention.heads": 4, "attention.kv_heads": 4, "attention.head_dim": 8, "mlp.ffn": 64,
        "mlp.activation": "gelu", "mlp.bias": True, "attention.qkv_bias": True, "attention.o_bias": True, "norm.kind": "LayerNorm",
        "norm.epsilon": 1e-5, "mlp.gated": False, "vocab": 176, "max_positions": 64, "positions.kind": "learned",
        "tie_embeddings": True, "token_types": 2, "head.binary": True, "head.activation": "gelu",
    },
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence: bool = False
    distributed: bool = False
    recompute: str | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = [
            f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp") if getattr(self, name) > 1
        ]
        words = {"sp": self.sequence, "zero": self.distributed, self.recompute: self.recompute}
        return " ".join([*sizes, *(word for word, said in words.items() if word and said)]) or "one"


def make_engine(case: Case, config: ModelConfig = CONFIG) -> Engine:
    training = EXPECTED["training"]
    layout = Layout(case.tp, case.pp, 1, stage_layers=(config.layer_count // case.pp,) * case.pp)
    options = ModelOptions(
        "float32",
        sequence_parallel=case.sequence,
        vocab_divisor=1,
        recompute=Recompute(case.recompute),
    )
    optimizer = OptimizerOptions(
        betas=tuple(training["betas"]), eps=training["eps"], clip_grad=training["clip_grad"],
        distributed=case.distributed, bucket_elements=5000,
    )  # fmt: skip
    engine = Engine(config, make_grid(layout, case.dp, torch.device("cpu")), options, optimizer)
    weights = canonical(config, FIXTURES / "bert" / "weights.safetensors")
    load_weights(engine, {name: as_lazy(array) for name, array in weights.items()})
    return engine


def own_batches(engine: Engine, step: int) -> list[Microbatch]:
    samples = np.load(FIXTURES / "masked" / "expected.npz")
    found = []
    for index, rows in enumerate(EXPECTED["steps"][step]["rows"]):
        names = ("text", "labels", "loss_mask", "types", "padding_mask", "is_random")
        text, labels, mask, types, visible, swapped = (
            torch.from_numpy(samples[f"bert/train/{name}"][rows].astype(np.int64)) for name in names
        )
        seen = visible.bool()
        found.append(
            Microbatch(
                text,
                labels,
                mask.float(),
                types=types,
                visible=seen,
                extras={"swapped": swapped},
                index=index,
            )
        )
    return found[engine.grid.dp_rank :: engine.grid.dp]


Figures = tuple[float, float, float]
"""The figures of one step: loss of hidden words, loss of swapped parts, norm."""


def train(_rank: int, case: Case, steps: int = 10) -> list[Figures]:
    engine, training = make_engine(case), EXPECTED["training"]
    found = []
    for step in range(steps):
        report = engine.train_step(
            own_batches(engine, step), training["lr"], training["weight_decay"]
        )
        found.append((report.loss, report.others[SWAPPED], report.grad_norm))
    engine.finish()
    engine.grid.close()
    return found


def compare(found: list[Figures]) -> None:
    for step, (figures, answer) in enumerate(zip(found, EXPECTED["steps"], strict=True)):
        expected = np.mean(answer["lm"]), np.mean(answer["sop"]), answer["grad_norm"]
        assert figures == pytest.approx(expected, rel=1e-5), f"step {step}"


def test_ten_steps_are_megatron_cores() -> None:
    compare(train(0, Case()))


LAYOUTS = [
    Case(tp=2, sequence=True),
    Case(tp=2, pp=2),
    Case(pp=2, dp=2, distributed=True, recompute="full"),
]
MORE_LAYOUTS = [
    Case(tp=2), Case(pp=2), Case(dp=2), Case(dp=2, distributed=True), Case(tp=2, pp=2, sequence=True, recompute="selective"),
    Case(tp=2, dp=2, sequence=True, distributed=True), Case(tp=4, sequence=True), Case(recompute="full"), Case(recompute="selective"),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_ten_steps_at_a_layout_are_megatron_cores_in_one_process(case: Case, world: World) -> None:
    for found in world.run(case.world, train, case):
        compare(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_LAYOUTS, ids=str)
def test_ten_steps_at_further_layouts(case: Case, world: World) -> None:
    for found in world.run(case.world, train, case):
        compare(found)


def answers(place: Path, tokens: Tensor, types: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(logits of words [batch, sequence, vocabulary], of the order of two parts [batch, 2]) of a checkpoint, in one process."""
    source = megaconv.open(place)
    layout = Layout(stage_layers=(source.config.layer_count,))
    engine = Engine(
        source.config, make_grid(layout, 1, torch.device("cpu")), ModelOptions("float32"), None
    )
    load_weights(engine, source.tensors)
    batch = Microbatch(tokens, tokens, types=types, visible=visible.bool())
    logits, last = engine.logits(batch), engine.last_stage(batch)
    assert logits is not None
    assert last is not None
    network, hidden = last
    assert isinstance(network, Bert)
    assert network.pooler is not None
    assert network.binary_head is not None
    return logits, network.binary_head(network.pooler(hidden)).detach()


@pytest.mark.parametrize("name", ["core-bert-tp2pp2/checkpoint", "dist-bert-tp2pp2"])
def test_logits_of_megatrons_own_checkpoints_are_its_own(name: str) -> None:
    place = CHECKPOINTS / name
    asked = load_file(CHECKPOINTS / name.partition("/")[0] / "logits.safetensors")
    tokens = asked["input_ids"]
    types, visible = (
        asked.get("token_type_ids", tokens * 0),
        asked.get("attention_mask", tokens * 0 + 1),
    )
    logits, order = answers(place, tokens, types, visible)
    shown = visible.bool()
    assert torch.allclose(logits[shown], asked["logits"][shown][:, : logits.shape[-1]], atol=1e-5)
    assert torch.allclose(order, asked["binary_logits"], atol=1e-5)


def test_without_a_binary_head_there_is_one_loss() -> None:
    config = changed(CONFIG, {"head.binary": False, "token_types": 0})
    options = ModelOptions("float32", vocab_divisor=1)
    engine = Engine(
        config,
        make_grid(Layout(stage_layers=(2,)), 1, torch.device("cpu")),
        options,
        OptimizerOptions(),
    )
    init_weights(engine, 0.02, 1)
    report = engine.train_step(own_batches(engine, 0), 1e-3)
    assert report.loss == pytest.approx(np.log(config.vocab), rel=0.02)
    assert report.others == {}


def test_the_original_bert_is_refused_by_what_it_does() -> None:
    config = changed(CONFIG, {"norm.place": "after_sum"})
    with pytest.raises(NotExpressible, match="norms after the residual sums, as the original BERT"):
        make_plan(config, Layout(stage_layers=(2,)), ModelOptions(), TensorGroup())
