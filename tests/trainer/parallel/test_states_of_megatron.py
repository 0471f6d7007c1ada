"""Ten steps of layers with a state are those of Megatron core 0.16.1, at any layout.

The fixtures are core's own models in one process: hybrids of Mamba 2, and gated delta nets with gated attention. Core's
layouts are not compared: at some of them, core's own gradients differ from those of one process.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from formats import safetensors
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.families import family
from megaconv.model.fields import from_fields
from megaconv.model.layout import Chunk, LayerSplit, Layout, split_layers
from megaconv.model.naming import core_naming
from megaconv.model.natives import native_tensors
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.weights import load_weights, read_rows
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import Balancing, ModelOptions, OptimizerOptions
from megatron_lite.settings.sizes import check_sizes
from tests.trainer.parallel.small import BLOCK, FULL, NONE, SELECTIVE, Recompute
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[1] / "fixtures"
TOKENS = 64

_SIZES = {
    "hidden": 32, "attention.heads": 4, "attention.kv_heads": 2, "attention.head_dim": 8, "mlp.ffn": 64, "vocab": 128,
    "max_positions": 64,
}  # fmt: skip
_MAMBA = {
    **_SIZES, "norm.epsilon": 1e-5, "positions.kind": "none", "mlp.activation": "relu2", "mlp.gated": False, "mamba.heads": 8,
    "mamba.head_dim": 8, "mamba.groups": 2, "mamba.state": 16,
}  # fmt: skip
_DELTA = {
    **_SIZES, "norm.epsilon": 1e-6, "positions.theta": 10000.0, "positions.rotary_percent": 0.25, "attention.qk_norm": True,
    "attention.output_gate": True, "linear.key_heads": 4, "linear.value_heads": 8, "linear.key_dim": 6, "linear.value_dim": 8,
    "linear.conv": 4, "layers.mixer": ("linear", "linear", "linear", "attention"),
}  # fmt: skip
_PURE = from_fields(
    "nemotron_h",
    {
        **_MAMBA,
        "layers.count": 4,
        "layers.mixer": "mamba",
        "layers.mlp": "none",
        "tie_embeddings": True,
    },
)
MODELS = {
    "mamba2": _PURE,
    "mamba2-packed": _PURE,
    "hybrid": from_fields(
        "nemotron_h",
        {
            **_MAMBA, "layers.count": 5, "layers.mixer": ("mamba", "attention", "none", "none", "mamba"),
            "layers.mlp": ("none", "none", "dense", "experts", "none"), "experts.count": 4, "experts.per_token": 2, "experts.ffn": 24,
            "experts.shared_ffn": 40, "experts.score": "sigmoid", "experts.router_bias": True, "experts.scale": 2.5,
        },
    ),
    "gdn-dense": from_fields("qwen3_5", {**_DELTA, "layers.count": 4, "tie_embeddings": True}),
    "gdn-moe": from_fields(
        "qwen3_next",
        {
            **_DELTA, "layers.count": 4, "layers.mlp": "experts", "experts.count": 4, "experts.per_token": 2, "experts.ffn": 24,
            "experts.shared_ffn": 24, "experts.shared_gate": True,
        },
    ),
}  # fmt: skip
BALANCING = {"hybrid": (("seq_aux_loss", 1e-2 / 2),), "gdn-moe": (("aux_loss", 1e-2),)}
"""Losses and coefficients. With --calculate-per-token-loss, core counts the tokens of one sequence for a loss by sequence.

A microbatch has two sequences, so half of core's coefficient gives the same loss.
"""


@dataclass(frozen=True)
class Tolerance:
    """Relative ones; gradients against each tensor's largest value."""

    logits: float
    gradients: float
    losses: float
    norms: float


MAMBA = Tolerance(1e-5, 2e-5, 1e-6, 1e-5)
DELTA = Tolerance(5e-5, 2e-4, 2e-6, 2e-3)
"""Triangular systems magnify rounding: two implementations differ by more, without a mistake of either."""
TOLERANCES = {name: DELTA if name.startswith("gdn") else MAMBA for name in MODELS}


@dataclass(frozen=True)
class Case:
    model: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False
    recompute: Recompute = NONE

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "ep", "dp", "cp")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += ["sp"] * self.sequence_parallel + ["zero"] * self.distributed
        return " ".join([self.model, *words, self.recompute.granularity or ""]).strip()


@dataclass(frozen=True)
class Whole:
    """A canonical tensor in memory."""

    tensor: Tensor
    shape: Shape
    dtype: str = "float32"

    def read_into(self, box: Box, out: Bytes) -> None:
        rows = self.tensor[box.row0 : box.row1, box.col0 : box.col1]
        out.view(np.float32)[:] = rows.numpy()


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"state-{name}" / "expected.json").read_text())
    return found


def array(name: str, file: str) -> Any:
    return np.load(FIXTURES / f"state-{name}" / file)


def canonical(name: str, file: str) -> dict[str, LazyTensor]:
    """The tensors of a fixture by canonical name. Names in the file are those of core's local layers."""
    config = MODELS[name]
    # Packed rows are of the same weights.
    place = name if file.startswith("gradients") else name.removesuffix("-packed")
    stored = safetensors.read(FIXTURES / f"state-{place}" / file)
    shapes = canonical_shapes(family(config.family).rows, config)
    found = {each: torch.zeros(matrix_shape(shape)) for each, shape in shapes.items()}
    chunk = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    for native in native_tensors(
        family(config.family).rows, config, core_naming("local"), Layout(), 0, chunk, config.vocab
    ):
        if native.copy is not None or native.name.endswith("expert_bias"):
            continue
        matrix = read_whole(stored[native.name])
        for part, regions in native.parts.items():
            for region in regions:
                box = region.box
                rows = matrix[
                    region.row : region.row + box.rows, region.col : region.col + box.cols
                ]
                found[part][box.row0 : box.row1, box.col0 : box.col1] = rows
    return {each: Whole(tensor, shapes[each]) for each, tensor in found.items()}


def read_whole(tensor: LazyTensor) -> Tensor:
    rows, cols = matrix_shape(tensor.shape)
    data = np.empty((rows, cols * 4), np.uint8)
    tensor.read_into(Box(0, rows, 0, cols), data)
    found: Tensor = torch.from_numpy(data.view(np.float32))
    return found


def make_engine(case: Case) -> Engine:
    config, training = MODELS[case.model], expected(case.model)["training"]
    split = (
        split_layers(config.layer_count, case.pp, case.vpp, LayerSplit())
        if config.layer_count % case.pp == 0
        else (3, 2)
    )
    layout = Layout(case.tp, case.pp, case.vpp, case.ep, stage_layers=split)
    losses = BALANCING.get(case.model, ())
    options = ModelOptions(
        dtype="float32", sequence_parallel=case.sequence_parallel, recompute=case.recompute, vocab_divisor=1,
        balance=Balancing(losses=losses, bias_rate=1e-3), local_layers=True,
    )  # fmt: skip
    microbatches = training["gbs"] // training["mbs"] // case.dp
    dp = check_sizes(
        config, layout, world=case.world, options=options, sequence=TOKENS, microbatches=microbatches, cp=case.cp
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=(training["beta1"], training["beta2"]), eps=training["eps"], clip_grad=training["clip"], distributed=case.distributed,
    )  # fmt: skip
    grid = make_grid(layout, dp, torch.device("cpu"), cp=case.cp, experts=config.experts.count > 0)
    engine = Engine(config, grid, options, optimizer)
    load_weights(engine, canonical(case.model, "weights.safetensors"))
    return engine


def batches(case: Case, step: int, engine: Engine) -> list[Microbatch]:
    training = expected(case.model)["training"]
    size, rows = training["mbs"], training["gbs"]
    tokens = torch.from_numpy(array(case.model, "tokens.npy").astype(np.int64))
    numbers = array(case.model, "documents.npy") if case.model.endswith("packed") else None
    found = []
    for index in range(rows // size):
        first = step * rows + index * size
        part = tokens[first : first + size]
        documents = None if numbers is None else lengths(numbers[first : first + size])
        found.append(Microbatch(part[:, :-1], part[:, 1:], documents=documents, index=index))
    return found[engine.grid.dp_rank :: case.dp]


def lengths(numbers: Any) -> tuple[tuple[int, ...], ...]:
    """The lengths of each row's documents, from the number of each token's document."""
    return tuple(
        tuple(int(count) for count in np.unique(row, return_counts=True)[1]) for row in numbers
    )


@dataclass(frozen=True)
class Trained:
    logits: float | None
    """The largest difference, against the largest value."""
    gradients: Mapping[str, float]
    losses: list[float]
    norms: list[float]


def train(_rank: int, case: Case, steps: int) -> Trained:
    engine, wanted = make_engine(case), expected(case.model)
    logits = None
    if (FIXTURES / f"state-{case.model}" / "logits.npy").exists():
        tokens = torch.from_numpy(array(case.model, "tokens.npy")[:2, :-1].astype(np.int64))
        ours = engine.logits(Microbatch(tokens, tokens))
        theirs = torch.from_numpy(array(case.model, "logits.npy"))
        logits = None if ours is None else far(ours, theirs)
    gradients: dict[str, float] = {}
    losses, norms = [], []
    for step in range(steps):
        report = engine.train_step(
            batches(case, step, engine), wanted["lr"][step], wanted["training"]["wd"]
        )
        losses.append(report.loss)
        norms.append(report.grad_norm)
        if not step and not case.distributed:
            gradients = of_gradients(engine, case.model, max(1.0, report.grad_norm))
    engine.finish()
    engine.grid.close()
    return Trained(logits, gradients, losses, norms)


def of_gradients(engine: Engine, name: str, clipped: float) -> dict[str, float]:
    """The distance of each part of this rank's gradients from core's, before clipping. clipped: the divisor of our
    gradients."""
    assert engine.optimizer is not None
    theirs = canonical(name, "gradients-step1.safetensors")
    found: dict[str, float] = {}
    for item in engine.optimizer.ranges():
        own = item.gradient.view(matrix_shape(item.shape)) * clipped
        for part, regions in item.info.native.parts.items():
            whole = read_whole(theirs[part]).abs().max()
            for region in regions:
                box = region.box
                rows = own[region.row : region.row + box.rows, region.col : region.col + box.cols]
                wanted = read_rows(theirs[part], region, 0, box.rows)
                strays = float((rows - wanted).abs().max() / whole)
                found[part] = max(found.get(part, 0.0), strays)
    return found


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


LAYOUTS = [
    *(Case(model) for model in MODELS),
    Case("mamba2", tp=2),
    Case("mamba2-packed", tp=2, sequence_parallel=True, recompute=FULL),
    Case("mamba2", pp=2, vpp=2),
    Case("mamba2-packed", cp=2),
    Case("mamba2", cp=4),
    Case("mamba2", tp=2, cp=2, recompute=SELECTIVE),
    Case("hybrid", pp=2, recompute=BLOCK),
    Case("hybrid", tp=2, ep=2, sequence_parallel=True),
    Case("hybrid", dp=2, ep=2, distributed=True),
    Case("gdn-dense", tp=2),
    Case("gdn-dense", tp=2, sequence_parallel=True, recompute=FULL),
    Case("gdn-dense", pp=2, vpp=2),
    Case("gdn-dense", cp=2, recompute=SELECTIVE),
    Case("gdn-moe", tp=2, ep=2, sequence_parallel=True),
    Case("gdn-moe", dp=2, ep=2, distributed=True),
]
FURTHER = [
    Case("mamba2", tp=2, sequence_parallel=True),
    Case("mamba2", pp=2),
    Case("mamba2", dp=2, distributed=True),
    Case("mamba2-packed", tp=2, cp=2, sequence_parallel=True),
    Case("hybrid", cp=2),
    Case("hybrid", cp=2, ep=2),
    Case("hybrid", tp=2, pp=2, ep=2, sequence_parallel=True),
    Case("gdn-dense", pp=2),
    Case("gdn-dense", cp=4),
    Case("gdn-dense", tp=2, cp=2),
    Case("gdn-dense", dp=2, distributed=True),
    Case("gdn-moe", cp=2, ep=2),
]


@pytest.mark.parametrize(
    "case", [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.slow) for case in FURTHER)], ids=str
)
def test_ten_steps_are_those_of_megatron_core(case: Case, world: World) -> None:
    wanted, allowed = expected(case.model), TOLERANCES[case.model]
    # The terms of a decay's gradient almost cancel. Ranks, and processors with AVX-512, sum them in another order. With
    # Mamba 2, its gradient is 2.2e-5 off with TP2 and CP2, and 2.3e-5 with AVX-512.
    of_decays = 2 * allowed.gradients
    for found in world.run(case.world, train, case, len(wanted["loss"])):
        assert found.logits is None or found.logits < allowed.logits
        too_far = {
            part: far
            for part, far in found.gradients.items()
            if far > (of_decays if part.endswith("A_log") else allowed.gradients)
        }
        assert too_far == {}
        assert found.losses == pytest.approx(wanted["loss"], rel=allowed.losses)
        assert found.norms == pytest.approx(wanted["grad_norm"], rel=allowed.norms)
