"""Mixtures of experts: ten steps of Megatron core's own model and training, at any layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from formats.tensor import matrix_shape
from megaconv.engine.stream import as_lazy
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megaconv.model.naming import CORE_LOCAL
from megaconv.model.natives import native_tensors
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.options import Balancing, ModelOptions, OptimizerOptions, Recompute
from tests.trainer.parallel.worlds import World

FIXTURES = Path(__file__).parents[1] / "fixtures"


@dataclass(frozen=True)
class Mixture:
    """A run of a fixture, and the layout that it is trained at."""

    name: str = "mixtral"
    run: str = "mixtral"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    distributed: bool = False
    recompute: str | None = None
    dispatcher: str = "alltoall"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def directory(self) -> Path:
        return FIXTURES / f"moe-{self.name}"

    def expected(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "expected.json").read_text())
        return found

    def config(self) -> dict[str, Any]:
        """The configuration in core's words."""
        whole = self.expected()
        found: dict[str, Any] = (
            {"mtp_loss_scaling_factor": 0.1} | whole["base"] | whole["runs"][self.run]["config"]
        )
        return found

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "dp", "ep", "etp")
            if getattr(self, name) > 1
        ]
        words += ["zero"] * self.distributed + [self.dispatcher] * (self.dispatcher != "alltoall")
        return " ".join([self.run, *words, *filter(None, [self.recompute])])


def describe(case: Mixture) -> tuple[ModelConfig, Balancing]:
    """Megatron's words in ours."""
    base = case.config()
    shared = base.get("moe_shared_expert_intermediate_size", 0)
    sigmoid = base.get("moe_router_score_function") == "sigmoid"
    of_layers = base.get("moe_layer_freq", [1] * base["num_layers"])
    latent, further = base.get("multi_latent_attention", False), base.get("mtp_num_layers", 0)
    family = (
        "deepseek_v3"
        if latent
        else "glm4_moe"
        if sigmoid or further
        else "qwen2_moe"
        if shared
        else "mixtral"
    )
    rope_dim, heads = base.get("qk_pos_emb_head_dim", 0), base["num_attention_heads"]
    config = from_fields(
        family,
        {
            "layers.count": base["num_layers"], "layers.mlp": tuple("experts" if one else "dense" for one in of_layers),
            "hidden": base["hidden_size"],
            "attention.heads": heads, "attention.kv_heads": heads if latent else base["num_query_groups"],
            "attention.head_dim": base["qk_head_dim"] + rope_dim if latent else base["hidden_size"] // heads,
            "latent.q_rank": base.get("q_lora_rank", 0), "latent.kv_rank": base.get("kv_lora_rank", 0), "latent.rope_dim": rope_dim,
            "latent.v_dim": base.get("v_head_dim", 0), "mtp_layers": further,
            "mlp.ffn": base["ffn_hidden_size"],
            "vocab": base["vocab_size"], "max_positions": 32, "norm.epsilon": base["layernorm_epsilon"],
            "positions.theta": float(base["rotary_base"]), "experts.count": base["num_moe_experts"],
            "experts.per_token": base["moe_router_topk"], "experts.ffn": base["moe_ffn_hidden_size"],
            "experts.renormalize": not base.get("moe_router_pre_softmax", False), "experts.shared_ffn": shared,
            "experts.shared_gate": bool(shared) and not sigmoid, "experts.score": "sigmoid" if sigmoid else "softmax",
            "experts.router_bias": sigmoid, "experts.scale": base.get("moe_router_topk_scaling_factor"),
            "experts.groups": base.get("moe_router_num_groups"), "experts.group_topk": base.get("moe_router_group_topk"),
        },
    )  # fmt: skip
    kinds, coefficients = (
        base["moe_router_load_balancing_type"],
        base.get("moe_aux_loss_coeff", 0.0),
    )
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    dtype = {"fp32": "float32"}.get(base.get("moe_router_dtype", ""))
    losses = tuple(zip(kinds, coefficients, strict=True))
    rate = base.get("moe_router_bias_update_rate", 0.0)
    return config, Balancing(
        losses, base.get("moe_z_loss_coeff", 0.0), rate, base.get("moe_expert_capacity_factor"),
        base.get("moe_token_drop_policy", "probs"), dtype, base.get("moe_pad_expert_input_to_capacity", False),
    )  # fmt: skip


def canonical(config: ModelConfig, file: Path) -> dict[str, np.ndarray]:
    """The canonical tensors in a file of core's whole tensors."""
    rows, layout = family(config.family).rows, Layout(stage_layers=(config.layer_count,))
    (chunk,) = layout.chunks()
    found = {
        name: np.zeros(shape, np.float32) for name, shape in canonical_shapes(rows, config).items()
    }
    tensors = load_file(file)
    for native in native_tensors(rows, config, CORE_LOCAL, layout, 0, chunk, config.vocab):
        if native.copy is not None or (
            native.name.endswith("expert_bias") and native.name not in tensors
        ):
            continue  # a second one, or without a gradient
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


def make_engine(case: Mixture) -> Engine:
    config, balance = describe(case)
    stages = (config.layer_count // case.pp,) * case.pp
    layout = Layout(case.tp, case.pp, 1, case.ep, case.etp, stage_layers=stages)
    training = case.expected()["training"]
    options = ModelOptions(
        "float32", sequence_parallel=case.tp > 1, balance=balance, vocab_divisor=1,
        recompute=Recompute(case.recompute), mtp_loss_scale=case.config()["mtp_loss_scaling_factor"],
        dispatcher=case.dispatcher,
    )  # fmt: skip
    optimizer = OptimizerOptions(
        betas=tuple(training["betas"]), eps=training["eps"], clip_grad=training["clip_grad"],
        distributed=case.distributed, bucket_elements=5000,
    )  # fmt: skip
    engine = Engine(
        config, make_grid(layout, case.dp, torch.device("cpu"), experts=True), options, optimizer
    )
    weights = canonical(config, case.directory / "weights.safetensors")
    load_weights(engine, {name: as_lazy(array) for name, array in weights.items()})
    return engine


def own_batches(case: Mixture, engine: Engine, step: int) -> list[Microbatch]:
    tokens = torch.from_numpy(np.load(case.directory / "tokens.npy")[step].astype(np.int64))
    own = list(enumerate(tokens))[engine.grid.dp_rank :: case.dp]
    return [Microbatch(batch[:, :-1], batch[:, 1:], index=index) for index, batch in own]


Figures = tuple[float, float, list[list[float]], list[float]]
"""The figures of one step: loss, norm, then the experts' biases of this rank's routers that have them, and losses of
further tokens."""


def train(
    _rank: int, case: Mixture, steps: int = 10
) -> tuple[list[Figures], dict[str, dict[int, float]]]:
    """(figures of each step; balancing losses of the first, by name and layer)."""
    engine, training = make_engine(case), case.expected()["training"]
    found, logged = list[Figures](), dict[str, dict[int, float]]()
    for step in range(steps):
        report = engine.train_step(
            own_batches(case, engine, step), training["lr"], training["weight_decay"]
        )
        biases = [
            tensor.tolist()
            for _, name, tensor in engine.parameters()
            if name.endswith("expert_bias")
        ]
        found.append((report.loss, report.grad_norm, biases, list(report.others.values())))
        if not step:
            logged = engine.balancing_losses()
    engine.finish()
    engine.grid.close()
    return found, logged


def compare(case: Mixture, found: list[Figures]) -> None:
    answers = case.expected()["runs"][case.run]["answers"]
    # The loss over all ranks is another one by definition where they share out microbatches.
    answers = answers["ep2 dp2" if case.run == "global" and case.dp == 2 else "one process"]
    for step, ((loss, norm, biases, further), answer) in enumerate(
        zip(found, answers, strict=True)
    ):
        assert loss == pytest.approx(answer["loss"], rel=1e-5), f"step {step}"
        assert norm == pytest.approx(answer["grad_norm"], rel=1e-5), f"step {step}"
        assert further == pytest.approx(answer.get("mtp_loss", []), rel=1e-5), f"step {step}"
        for bias, expected in zip(biases, answer.get("expert_bias", []), strict=case.pp == 1):
            assert bias == pytest.approx(expected, abs=1e-7), f"step {step}"


@pytest.mark.parametrize(
    "case",
    [
        Mixture(), Mixture(run="two_losses"), Mixture("qwen", "qwen"), Mixture("deepseek", "deepseek", recompute="full"),
        Mixture("mtp", "mtp2"), Mixture("mla", "mla_mtp"), Mixture(run="global"), Mixture(run="drop_probs"), Mixture(run="drop_position"),
        Mixture(run="drop_pad"),
    ],
    ids=str,
)  # fmt: skip
def test_ten_steps_of_one_process_are_megatron_cores(case: Mixture) -> None:
    compare(case, train(0, case)[0])


LAYOUTS = [
    Mixture(dp=2, ep=2), Mixture("qwen", "qwen", tp=2, ep=2), Mixture(tp=2, ep=1), Mixture(pp=2, dp=2, ep=2, distributed=True),
    Mixture("deepseek", "deepseek", tp=2, dp=2, ep=2, distributed=True),
    Mixture("mla", "mla_mtp", tp=2, pp=2, ep=2), Mixture("deepseek", "deepseek", tp=2, dp=2, ep=2, etp=2, distributed=True),
    Mixture("deepseek", "deepseek", tp=2, dp=2, ep=2, etp=2, dispatcher="allgather"),
    Mixture(run="drop_probs", dp=2, ep=2, dispatcher="allgather"), Mixture(run="drop_pad", dp=2, ep=2),
]  # fmt: skip
MORE_LAYOUTS = [
    Mixture(recompute="full"), Mixture("qwen", "qwen", recompute="selective"), Mixture("deepseek", "deepseek"),
    Mixture(run="global", recompute="full"), Mixture(run="two_losses", tp=2, dp=2, ep=4),
    Mixture(dp=4, ep=4), Mixture(dp=4, ep=2), Mixture(dp=4, ep=2, distributed=True), Mixture("qwen", "qwen", tp=2, dp=2, ep=2),
    Mixture("qwen", "qwen", tp=2, pp=2, ep=2, distributed=True), Mixture("qwen", "qwen", dp=2, ep=2), Mixture(pp=2),
    Mixture(dp=2, ep=1), Mixture(tp=2, dp=2, ep=1, distributed=True), Mixture(dp=2, ep=2, recompute="full"),
    Mixture("mtp", "mtp2", pp=2, dp=2, ep=2, distributed=True), Mixture("mtp", "mtp2", recompute="full"),
    Mixture(run="global", dp=2, ep=2), Mixture(run="global", tp=2, ep=2),
    Mixture(run="drop_probs", dp=2, ep=2, distributed=True), Mixture(run="drop_position", pp=2, dp=2, ep=2),
    Mixture("mla", "mla_mtp", dp=2, ep=2), Mixture("mla", "mla_mtp", tp=2, dp=2, ep=4),
    Mixture("deepseek", "deepseek", dp=2, ep=2), Mixture("deepseek", "deepseek", pp=2, dp=2, ep=2),
    Mixture(tp=2, etp=2), Mixture(tp=2, pp=2, etp=2, distributed=True), Mixture(dp=2, etp=2), Mixture(dp=4, ep=2, etp=2),
    Mixture("qwen", "qwen", tp=2, dp=2, etp=2, distributed=True), Mixture("qwen", "qwen", tp=2, dp=2, etp=4),
    Mixture("mla", "mla_mtp", tp=2, pp=2, etp=2), Mixture("deepseek", "deepseek", tp=2, dp=2, ep=2, etp=2, recompute="full"),
    Mixture(tp=2, dp=2, ep=4, recompute="selective"), Mixture("mtp", "mtp2", tp=2, dp=2, ep=2, etp=2),
    Mixture(run="drop_probs", dp=2, etp=2), Mixture(run="global", tp=2, etp=2), Mixture(dispatcher="allgather"),
    Mixture("qwen", "qwen", tp=2, ep=2, dispatcher="allgather", distributed=True), Mixture(tp=2, dp=2, ep=4, dispatcher="allgather"),
    Mixture("mla", "mla_mtp", tp=2, pp=2, etp=2, dispatcher="allgather", recompute="full"),
]  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_ten_steps_at_a_layout_are_megatron_cores_in_one_process(
    case: Mixture, world: World
) -> None:
    """This includes a case in which core itself is wrong: tp 2 with whole experts on every rank."""
    for found, _ in world.run(case.world, train, case):
        compare(case, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_LAYOUTS, ids=str)
def test_ten_steps_at_further_layouts(case: Mixture, world: World) -> None:
    for found, _ in world.run(case.world, train, case):
        compare(case, found)


def test_gradients_of_the_first_step_are_megatron_cores() -> None:
    """The mean over its microbatches, before clipping."""
    for case in (
        Mixture(),
        Mixture("qwen", "qwen"),
        Mixture("deepseek", "deepseek"),
        Mixture("mtp", "mtp2"),
        Mixture("mla", "mla_mtp"),
    ):
        engine = make_engine(case)
        assert engine.optimizer is not None
        report = engine.train_step(own_batches(case, engine, 0), lr=0.0)
        expected = canonical(engine.config, case.directory / "gradients-step1.safetensors")
        clipped = min(1.0, 1.0 / (report.grad_norm + 1e-6))
        for item in engine.optimizer.ranges():
            gradient = item.gradient.numpy().reshape(matrix_shape(item.shape)) / clipped
            for name, regions in item.info.native.parts.items():
                whole = expected[name].reshape(matrix_shape(expected[name].shape))
                for region in regions:
                    box = region.box
                    ours = gradient[
                        region.row : region.row + box.rows, region.col : region.col + box.cols
                    ]
                    theirs = whole[box.row0 : box.row1, box.col0 : box.col1]
                    assert np.abs(ours - theirs).max() <= 1e-5 * max(np.abs(whole).max(), 1e-3), (
                        name
                    )


LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "z_loss": "z_loss",
}
"""The losses in core's words."""


@pytest.mark.parametrize("case", [Mixture(run="two_losses"), Mixture("qwen", "qwen")], ids=str)
def test_balancing_losses_are_those_that_megatron_core_logs(case: Mixture) -> None:
    _, logged = train(0, case, 1)
    expected = case.expected()["runs"][case.run]["answers"]["one process"][0]["aux"]
    assert logged
    for name, layers in logged.items():
        assert list(layers.values()) == pytest.approx(expected[LOGGED[name]], rel=1e-5)
