"""Mixers that keep a state of fixed size and float32 parameters: they train, save, resume and generate."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megaconv
from megaconv.families import family
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.restore import find_start, load
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.snapshot import dist_snapshot
from megatron_lite.checkpoint.state import Progress, common_state
from megatron_lite.engine import Engine
from megatron_lite.inference.batching import generate
from megatron_lite.inference.cache import SlotCache
from megatron_lite.inference.model import EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.slots import Recomputed
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.build_plan import make_plan
from megatron_lite.models.layer import Layer
from megatron_lite.models.mixers.delta_net import DELTA_NET
from megatron_lite.models.mixers.mamba import MAMBA
from megatron_lite.models.mixers.table import MIXERS, mixer_of, stays_in_float32
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.batch_size import BatchSize
from megatron_lite.settings.config import Checkpointing, Settings
from megatron_lite.settings.model import Model
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import Sizes
from tests.trainer.parallel import small
from tests.trainer.parallel.small import (
    CPU,
    MICROBATCHES,
    MODELS,
    ROWS,
    SEQUENCE,
    Case,
    make_engine,
    weights_of,
)
from tests.trainer.parallel.worlds import World

NAME = "delta nets alone"
CONFIG = from_fields(
    "qwen3_5",
    {
        **small.SIZES, "layers.count": 2, "layers.mixer": "linear", "attention.qk_norm": True, "attention.output_gate": True,
        "norm.zero_centered": True, "linear.key_heads": 2, "linear.value_heads": 4, "linear.key_dim": 4, "linear.value_dim": 6,
        "linear.conv": 3,
    },
)  # fmt: skip
FLOAT32 = ("A_log", "dt_bias")


@contextmanager
def delta_nets() -> Iterator[None]:
    """The model of delta nets alone, also in processes of a world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, NAME, CONFIG)
        yield


def step(engine: Engine, case: Case, number: int) -> float:
    found = small.step(engine, case, number)
    engine.finish()
    return found.loss


def save(engine: Engine, case: Case, root: Path, form: str) -> None:
    """Save as a run does."""
    layout, dtype = engine.grid.layout, {"dtype": engine.options.dtype}
    batch = BatchSize(ROWS * MICROBATCHES, ROWS * MICROBATCHES)
    sizes = Sizes(layout=layout, dp=case.dp, batch=batch, micro_batch=ROWS, seq=SEQUENCE)
    settings = Settings(
        model=Model(make_vocab_size_divisible_by=4), checkpointing=Checkpointing(ckpt_format=form)
    )
    progress = Progress(engine.step, engine=engine.state())
    config = changed(engine.config, dtype)
    common = common_state(
        settings, config, sizes, {}, progress, {}, (1e-3, 0.1, None), with_optimizer=True
    )
    take = dist_snapshot if form == "torch_dist" else rank_snapshot
    group = dist.new_group(backend="gloo") if case.world > 1 else None
    sidecars = {"config.json": family(config.family).config_json(config)}
    saver = Saver(root, form, engine.grid.rank, group, sidecars)
    impl = "local" if engine.options.local_layers else "transformer_engine"
    saver.save(take(engine, common, with_optimizer=True, impl=impl))
    saver.finish()


def resumed(case: Case, root: Path) -> Engine:
    engine = make_engine(case)
    start = find_start(Settings(checkpointing=Checkpointing(load=str(root))), finetune=False)
    assert start is not None
    assert start.with_optimizer
    load(engine, start)
    return engine


def run(
    _rank: int, case: Case, root: Path, form: str
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(losses, weights after two steps and a third, the same weights where a saved run made the third step)."""
    with delta_nets():
        engine = make_engine(case)
        losses = [step(engine, case, number) for number in range(2)]
        save(engine, case, root, form)
        again = resumed(case, root)
        assert {name: tensor.dtype for name, tensor in weights_of(again).items()} == {
            name: torch.float32 if name.endswith(FLOAT32) else engine.dtype
            for name in weights_of(engine)
        }
        losses.append(step(engine, case, 2))
        assert step(again, case, 2) == losses[2]
        weights, of_resumed = weights_of(engine), weights_of(again)
        engine.grid.close()
        again.grid.close()
    return losses, weights, of_resumed


IN_BF16 = (("dtype", "bfloat16"),)
CASES = [
    (Case(NAME, options=IN_BF16), "torch"),
    (Case(NAME, tp=2, sequence_parallel=True), "torch_dist"),
    (Case(NAME, dp=2, options=IN_BF16), "torch"),
    (Case(NAME, dp=2, distributed=True, options=IN_BF16), "torch_dist"),
    (Case(NAME, tp=2, dp=2, distributed=True, options=IN_BF16), "torch"),
]


@pytest.mark.parametrize(("case", "form"), CASES, ids=str)
def test_a_model_of_two_dtypes_trains_as_in_one_process_and_resumes_bit_for_bit(
    case: Case, form: str, world: World, tmp_path: Path
) -> None:
    ((losses, expected, _),) = world.run(1, run, case.alone(), tmp_path / "alone", "torch_dist")
    in_bf16 = case.options == IN_BF16
    for rank, (found, weights, of_resumed) in enumerate(
        world.run(case.world, run, case, tmp_path / "save", form)
    ):
        assert found == pytest.approx(losses, rel=1e-3 if in_bf16 else 1e-5)
        for name, tensor in weights.items():
            assert torch.equal(tensor, of_resumed[name]), name
            if name.endswith(FLOAT32):
                whole = expected[name]
                own = whole.chunk(case.tp)[rank % case.tp]
                torch.testing.assert_close(
                    tensor, own, rtol=2e-2 if in_bf16 else 1e-4, atol=3e-4 if in_bf16 else 1e-6
                )
                assert tensor.bfloat16().float().ne(tensor).any(), "more than bf16 can hold"
    checkpoint = megaconv.open(tmp_path / "save")
    assert checkpoint.tensors["layers.0.linear.A_log"].dtype == "float32"


def test_rows_with_states_of_fixed_size_are_generated_as_if_they_were_computed_anew() -> None:
    """Prompts of unequal length, beside each other: a token of padding would change a state."""
    requests = [
        Request(prompt, 5, Sampling(0)) for prompt in ((3, 9, 4), (7,), (1, 2, 3, 4, 5, 6), (8, 8))
    ]
    with delta_nets():
        engine = make_engine(Case(NAME))

        def logits(rows: Any) -> list[Tensor]:
            tokens = [torch.tensor([row]) for row in rows]
            found = [engine.logits(Microbatch(each, each)) for each in tokens]
            return [each[0] for each in found if each is not None]

        expected = generate(Recomputed(logits, 2, 16), requests)
        model = EngineModel(engine, 2, 16)
        assert [answer.tokens for answer in generate(model, requests)] == [
            answer.tokens for answer in expected
        ]
        assert model.cache.bytes() == 2 * 2 * 4 * (2 * (2 * 2 * 4 + 4 * 6) + 4 * 4 * 6)


def test_states_are_copied_whole_and_begin_with_zeros() -> None:
    cache = SlotCache({0: DELTA_NET.cache(CONFIG, CONFIG.sizes())}, 3, 8, torch.bfloat16, CPU)
    cache.select([0, 2], [0, 0], 1, CPU)
    convolution, state = cache.states(0)
    assert (convolution.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert not convolution.any()
    cache.keep(0, convolution + 1, state + torch.tensor([1.0, 2.0])[:, None, None, None])
    cache.copy([2], [1], used=1)
    cache.select([0, 1, 2], [1, 1, 0], 1, CPU)
    _, found = cache.states(0)
    assert found[:, 0, 0, 0].tolist() == [1.0, 2.0, 0.0]


def test_every_mixer_of_the_model_description_is_declared() -> None:
    computed = {"attention", "convolution", "latent", "linear", "mamba", "none", "sparse"}
    refused_by_name = {"compressed", "kda", "side_by_side"}
    assert set(MIXERS) == computed | refused_by_name
    assert mixer_of(MODELS["deepseek_v3"], MODELS["deepseek_v3"].layers[0]) is MIXERS["latent"]
    mamba = changed(
        CONFIG, {"mamba.heads": 4, "mamba.head_dim": 3, "mamba.groups": 2, "mamba.state": 5}
    )
    convolution, state = MAMBA.cache(mamba, mamba.sizes())
    assert (convolution.shape, state.shape) == ((4 * 3 + 2 * 2 * 5, 3), (4, 3, 5))
    assert stays_in_float32("decoder.layers.0.mixer.D")
    assert not stays_in_float32("decoder.layers.0.mixer.norm.weight")


@pytest.mark.parametrize(
    ("fields", "parts"),
    [({"layers.mixer": "none"}, {"mlp"}), ({"layers.mlp": "none"}, {"self_attention"})],
)
def test_a_layer_may_have_a_mixer_alone_or_an_mlp_alone(
    fields: dict[str, str], parts: set[str]
) -> None:
    plan = make_plan(MODELS["llama"], Layout(stage_layers=(4,)), ModelOptions(), TensorGroup())
    whole, alone = Layer(plan, 0), Layer(replace(plan, config=changed(plan.config, fields)), 0)
    assert {name.partition(".")[0] for name, _ in whole.named_parameters()} == {
        "self_attention",
        "mlp",
    }
    assert {name.partition(".")[0] for name, _ in alone.named_parameters()} == parts
