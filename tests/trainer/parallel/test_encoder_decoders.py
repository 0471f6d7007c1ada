"""T5: ten steps of Megatron core's own model and training, at any layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats.tensor import matrix_shape
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import Layout, split_stacks
from megaconv.model.naming import CORE, CORE_LOCAL
from megaconv.model.natives import native_tensors
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.build_plan import make_plan
from megatron_lite.parallel.grid import make_grid
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.worlds import World

NONE = Recompute()
FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPECTED = json.loads((FIXTURES / "t5" / "expected.json").read_text())
TRAINING = EXPECTED["training"]

CONFIG = from_fields(
    "t5",
    {
        "layers.count": 2, "encoder.layers": 2, "hidden": 32, "attention.heads": 4, "attention.kv_heads": 4, "attention.head_dim": 8,
        "mlp.ffn": 64, "vocab": 176, "max_positions": 64, "norm.kind": "LayerNorm", "norm.epsilon": 1e-5, "norm.final": False,
        "mlp.activation": "gelu", "mlp.gated": False, "mlp.bias": True, "attention.qkv_bias": True, "attention.o_bias": True,
        "attention.scale": None, "positions.kind": "learned", "tie_embeddings": True, "head.bias": True,
    },
)  # fmt: skip
"""Core's, of local layers without Transformer Engine."""


@dataclass(frozen=True)
class Case:
    tp: int = 1
    encoder_stages: int = 0
    """The number of pipeline stages of the encoder; 0: none."""
    decoder_stages: int = 1
    dp: int = 1
    distributed: bool = False
    recompute: Recompute = NONE
    config: tuple[tuple[str, Any], ...] = ()
    """Fields that differ."""
    dropout: float = 0.0
    clip: float = TRAINING["clip_grad"]

    @property
    def pp(self) -> int:
        return self.encoder_stages + self.decoder_stages

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        stages = f"pp{self.encoder_stages}+{self.decoder_stages}" if self.encoder_stages else ""
        words = [f"{name}{getattr(self, name)}" for name in ("tp", "dp") if getattr(self, name) > 1]
        words += [stages, "zero" if self.distributed else "", self.recompute.granularity or ""]
        return (
            " ".join(filter(None, [*words, *(str(value) for _, value in self.config)])) or "alone"
        )


def canonical(config: ModelConfig, file: Path) -> dict[str, np.ndarray]:
    """The canonical tensors in a file of core's whole tensors."""
    rows, layout = family(config.family).rows, Layout(stage_layers=(config.layer_count,))
    (chunk,) = layout.chunks()
    found = {
        name: np.zeros(shape, np.float32) for name, shape in canonical_shapes(rows, config).items()
    }
    tensors = load_file(file)
    for native in native_tensors(rows, config, CORE_LOCAL, layout, 0, chunk, config.vocab):
        if native.copy is not None:
            continue
        whole = tensors[native.name].numpy().reshape(matrix_shape(native.shape))
        for name, regions in native.parts.items():
            matrix = found[name].reshape(matrix_shape(found[name].shape))
            for region in regions:
                box = region.box
                rows_here = whole[
                    region.row : region.row + box.rows, region.col : region.col + box.cols
                ]
                matrix[box.row0 : box.row1, box.col0 : box.col1] = rows_here
    return found


def make_engine(case: Case) -> Engine:
    config = changed(CONFIG, dict(case.config))
    if case.encoder_stages:
        encoder, decoder = split_stacks(2, 2, case.pp, case.encoder_stages)
        layout = Layout(case.tp, case.pp, stage_layers=decoder, encoder_stage_layers=encoder)
    else:
        layout = Layout(case.tp, stage_layers=(2,))
    options = ModelOptions(
        "float32", sequence_parallel=case.tp > 1, vocab_divisor=1, recompute=case.recompute,
        hidden_dropout=case.dropout, attention_dropout=case.dropout,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=tuple(TRAINING["betas"]), eps=TRAINING["eps"], clip_grad=case.clip,
        distributed=case.distributed, bucket_elements=5000,
    )  # fmt: skip
    engine = Engine(config, make_grid(layout, case.dp, torch.device("cpu")), options, optimizer)
    weights = canonical(config, FIXTURES / "t5" / "weights.safetensors")
    load_weights(engine, {name: as_lazy(array) for name, array in weights.items()})
    return engine


def microbatches(step: int) -> list[Microbatch]:
    samples = np.load(FIXTURES / "masked" / "expected.npz")
    arrays = {
        name: samples[f"t5/train/{name}"]
        for name in ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask")
    }
    found = []
    for index, rows in enumerate(EXPECTED["steps"][step]["rows"]):
        source, tokens, labels, counting, seen = (
            torch.from_numpy(array[rows].astype(np.int64)) for array in arrays.values()
        )
        found.append(
            Microbatch(
                tokens,
                labels,
                counting.float(),
                source=source,
                source_visible=seen > 0,
                index=index,
            )
        )
    return found


def train(_rank: int, case: Case, steps: int = 10) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    engine, found = make_engine(case), []
    for step in range(steps):
        own = microbatches(step)[engine.grid.dp_rank :: case.dp]
        report = engine.train_step(own, TRAINING["lr"], TRAINING["weight_decay"])
        found.append((report.loss, report.grad_norm))
    engine.finish()
    engine.grid.close()
    return found


def compare(found: list[tuple[float, float]]) -> None:
    for step, ((loss, norm), answer) in enumerate(zip(found, EXPECTED["steps"], strict=False)):
        assert loss == pytest.approx(sum(answer["lm"]) / 2, rel=1e-5), f"step {step}"
        assert norm == pytest.approx(answer["grad_norm"], rel=1e-5), f"step {step}"


@pytest.mark.parametrize(
    "recompute",
    [NONE, Recompute("full"), Recompute("selective")],
    ids=lambda again: again.granularity,
)
def test_ten_steps_of_one_process_are_megatron_cores(recompute: Recompute) -> None:
    compare(train(0, Case(recompute=recompute)))


LAYOUTS = [
    Case(tp=2),
    Case(dp=2, distributed=True),
    Case(encoder_stages=1),
    Case(encoder_stages=1, decoder_stages=2),
]
MORE_LAYOUTS = [
    Case(dp=2), Case(encoder_stages=2), Case(encoder_stages=2, decoder_stages=2, recompute=Recompute("full")),
    Case(tp=2, encoder_stages=1), Case(tp=2, dp=2, distributed=True), Case(encoder_stages=1, dp=2, distributed=True),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_ten_steps_at_a_layout_are_megatron_cores(case: Case, world: World) -> None:
    for found in world.run(case.world, train, case):
        compare(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_LAYOUTS, ids=str)
def test_ten_steps_at_any_layout_are_megatron_cores(case: Case, world: World) -> None:
    for found in world.run(case.world, train, case):
        compare(found)


@pytest.mark.parametrize(
    "name", ["core-t5-tp2pp1/checkpoint", "pipelined-t5-tp2e1d1/checkpoint", "dist-t5-tp1pp1"]
)
def test_logits_of_megatrons_own_checkpoints(name: str) -> None:
    """Saved by runs of core 0.16, and of one that had stages; its own answers lie beside them."""
    checkpoint = Path(__file__).parents[2] / "fixtures" / name
    place = checkpoint.parent if checkpoint.name == "checkpoint" else checkpoint
    opened, answers = megaconv.open(checkpoint), load_file(place / "logits.safetensors")
    layout = Layout(stage_layers=(opened.config.layer_count,))
    engine = Engine(
        opened.config, make_grid(layout, 1, torch.device("cpu")), ModelOptions("float32"), None
    )
    load_weights(engine, opened.tensors)
    tokens = answers["decoder_input_ids"]
    found = engine.logits(Microbatch(tokens, tokens, source=answers["input_ids"]))
    assert found is not None
    torch.testing.assert_close(
        found, answers["logits"][..., : opened.config.vocab], rtol=1e-4, atol=1e-5
    )


def test_gradients_of_the_first_step_are_megatron_cores() -> None:
    engine = make_engine(Case(clip=0.0))
    engine.train_step(microbatches(0), lr=0.0)
    assert engine.optimizer is not None
    found = {item.name: item.gradient.view(item.shape) for item in engine.optimizer.ranges()}
    chunk, rows = engine.grid.chunks()[0], family("t5").rows
    named = [
        list(native_tensors(rows, CONFIG, naming, engine.grid.layout, 0, chunk, CONFIG.vocab))
        for naming in (CORE, CORE_LOCAL)
    ]
    expected = load_file(FIXTURES / "t5" / "gradients-step1.safetensors")
    for own, theirs in zip(*named, strict=True):
        if own.copy is None:
            whole = expected[theirs.name]
            assert (found[own.name] - whole).abs().max() <= 1e-5 * whole.abs().max(), own.name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention.scale": 1.0, "positions.kind": "relative"}, "a T5 of transformers, whose attention scores aren't divided"),
        ({"positions.kind": "relative", "positions.buckets": 8}, "relative positions, which can't be trained yet"),
        ({"encoder.layers": 3}, "3 layers in its encoder and 2 in its decoder"),
    ],
)  # fmt: skip
def test_a_t5_that_is_another_function_than_cores_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotExpressible, match=message):
        make_plan(changed(CONFIG, fields), Layout(stage_layers=(2,)), ModelOptions(), TensorGroup())
