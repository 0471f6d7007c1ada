"""Small models, batches, and a run of some steps at any layout."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import (
    ModelOptions,
    MuonOptions,
    OptimizerOptions,
    QkClip,
    Recompute,
)
from megatron_lite.settings.sizes import check_sizes

SEQUENCE, ROWS, MICROBATCHES = 16, 2, 4
"""Tokens of a sequence, sequences of a microbatch, microbatches of a step over all data-parallel ranks."""
NONE, FULL, BLOCK, SELECTIVE = (
    Recompute(),
    Recompute("full"),
    Recompute("full", "block", 1),
    Recompute("selective"),
)

MUON = MuonOptions()

SIZES: dict[str, Any] = {
    "layers.count": 4,
    "hidden": 32,
    "attention.heads": 4,
    "attention.kv_heads": 2,
    "attention.head_dim": 8,
    "mlp.ffn": 48,
    "vocab": 61,
    "max_positions": 32,
    "norm.epsilon": 1e-5,
    "positions.theta": 5000.0,
}
_BIASES = {"attention.qkv_bias": True, "attention.o_bias": True, "mlp.bias": True}
_EXPERTS = {"layers.mlp": "experts", "experts.count": 4, "experts.per_token": 2, "experts.ffn": 16}
_LATENT = {
    "layers.mlp": ("dense", "experts", "experts", "experts"), "experts.score": "sigmoid", "experts.router_bias": True,
    "experts.shared_ffn": 24, "attention.kv_heads": 4, "latent.kv_rank": 10, "latent.q_rank": 6, "latent.rope_dim": 4,
    "latent.v_dim": 6,
}  # fmt: skip
_SINKS = {
    "attention.sinks": True, "layers.window": (5, None, 5, None), "mlp.activation": "quick_gelu", "mlp.offset": 1.0,
    "mlp.clamp": 7.0,
}  # fmt: skip
_GEMMA_3 = {
    "attention.qk_norm": True, "norm.zero_centered": True, "norm.place": "both", "mlp.activation": "gelu_tanh", "embedding_scale": 32**0.5,
    "layers.window": (5, 5, None, 5), "positions.local_theta": 100.0, "attention.scale": 0.3,
}  # fmt: skip
_GEMMA_4 = {
    "attention.qk_norm": True, "attention.v_norm": True, "attention.scale": 0.3, "norm.place": "both", "mlp.activation": "gelu_tanh",
    "embedding_scale": 32**0.5, "layers.window": (5, None, 5, None), "layers.head_dim": (None, 12, None, 12),
    "layers.kv_heads": (None, 4, None, 4), "layers.keys_as_values": (False, True, False, True), "layer_scale": True,
    "positions.local_theta": 100.0, "positions.scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip
_CARRIED = {
    "layer_inputs.width": 6, "layer_inputs.vocab": 244, "layers.shares_kv": (False, False, True, True), "layers.ffn": (None, None, 64, 64),
    "layers.keys_as_values": False,
}  # fmt: skip
_MIMO_V2 = {
    "layers.window": (None, 5, 5, None), "layers.kv_heads": (None, 4, 4, None), "attention.v_dim": 6, "attention.value_scale": 0.7,
    "attention.sinks": True, "attention.sinks_in_windows": True, "positions.rotary_percent": 0.5, "positions.local_theta": 100.0,
    "positions.local_rotary_percent": 0.75, "layers.mlp": ("dense", "experts", "experts", "experts"), "experts.score": "sigmoid",
    "experts.router_bias": True,
}  # fmt: skip
_NEMOTRON_NAS = {
    "layers.mixer": ("attention", "none", "attention", "attention"), "layers.mlp": ("dense", "dense", "none", "dense"),
    "layers.kv_heads": (None, None, 4, None), "layers.ffn": (None, 64, None, None),
}  # fmt: skip
_LAGUNA = {
    "attention.qk_norm": True, "attention.head_gate": True, "attention.gate_activation": "softplus", "layers.heads": (None, 8, None, 2),
    "layers.window": (None, 5, None, 5), "positions.local_theta": 100.0, "positions.local_rotary_percent": 0.5,
    "layers.mlp": ("dense", "experts", "experts", "experts"), "experts.score": "sigmoid", "experts.router_bias": True,
    "experts.shared_ffn": 24, "experts.scale": 1.5,
}  # fmt: skip
_STEP = {
    "attention.qk_norm": True, "attention.head_gate": True, "norm.zero_centered": True, "layers.heads": (None, 8, None, 8),
    "layers.window": (None, 5, None, 5), "positions.rotary_percent": 0.5, "positions.local_theta": 100.0,
    "positions.local_rotary_percent": 1.0, "layers.mlp": ("dense", "experts", "experts", "dense"), "experts.score": "sigmoid",
    "experts.router_bias": True, "experts.shared_ffn": 24, "layers.limit": (None, 0.1, None, None),
    "layers.shared_limit": (None, 0.1, None, 0.1),
}  # fmt: skip
_LFM_3 = {
    "attention.qk_norm": True, "attention.head_gate": True, "norm.place": "both", "convolution.width": 3,
    "layers.mixer": ("convolution", "attention", "attention", "convolution"), "layers.window": (None, 5, None, None),
    "positions.local_theta": 100.0, "positions.scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip
_GEMMA_2 = {
    "norm.zero_centered": True, "norm.place": "both", "mlp.activation": "gelu_tanh", "embedding_scale": 32**0.5,
    "layers.window": (5, None, 5, None), "attention.score_cap": 1.5, "head.logit_cap": 2.5, "attention.scale": 0.3,
}  # fmt: skip
_LLAMA_4 = {
    "layers.mlp": ("dense", "experts", "dense", "experts"), "experts.score": "sigmoid", "experts.renormalize": False,
    "experts.probs_on_input": True, "experts.per_token": 1, "experts.shared_ffn": 16, "positions.interleaved": True,
    "layers.rotates": (True, True, False, True), "layers.chunk": (5, 5, None, 5), "attention.qk_l2_norm": True,
    "temperature.scale": 0.3, "temperature.interval": 3, "temperature.offset": 1,
}  # fmt: skip
_SPARSE = {"indexer.heads": 3, "indexer.head_dim": 6, "indexer.topk": 4}
_OLMO_2 = {
    "attention.qk_norm": True,
    "attention.qk_norm_width": "all",
    "norm.place": "after",
}
_KIMI = {
    **_LATENT, "layers.mixer": ("kda", "kda", "attention", "kda"), "positions.kind": "none", "linear.key_heads": 4, "linear.value_heads": 4,
    # Keys are divided by their lengths: over a few elements, this makes far more of rounding than in a real model.
    "linear.key_dim": 16, "linear.value_dim": 16, "linear.conv": 3,
}  # fmt: skip
_FALCON_H1 = {
    "layers.mixer": "side_by_side", "mamba.heads": 4, "mamba.head_dim": 6, "mamba.groups": 2, "mamba.state": 5, "mamba.norm": "none",
    "factors.keys": 0.5, "factors.attention_out": 0.7, "factors.mamba_in": 1.5, "factors.mamba_z": 0.6, "factors.mamba_b": 2.0,
    "factors.mlp_gate": 0.8, "factors.mlp_down": 1.3,
}  # fmt: skip
_APERTUS = {"attention.qk_norm": True, "mlp.activation": "xielu", "mlp.gated": False}
_GPT2 = {
    "positions.kind": "learned",
    "norm.kind": "LayerNorm",
    "mlp.activation": "gelu_tanh",
    "mlp.gated": False,
}
_MPT = {
    "positions.kind": "alibi",
    "norm.bias": False,
    "mlp.activation": "gelu",
    "attention.kv_heads": 4,
}
_BEAM = {
    "attention.qk_norm": True, "attention.output_gate": True, "attention.gate_bias": True, "norm.place": "both", "residual_by_depth": True,
    "layers.window": (5, None, 5, None), "layers.rotates": (True, False, True, False), "temperature.scale": 0.3, "temperature.interval": 3,
    "temperature.offset": 1, "temperature.power": True, "layers.mlp": ("dense", "experts", "experts", "experts"),
    "experts.score": "sigmoid", "experts.router_bias": True, "experts.shared_ffn": 24, "experts.scale": 1.5, "head.logit_cap": 2.5,
}  # fmt: skip
_DBRX = {"norm.kind": "LayerNorm", "norm.bias": False, "attention.clip": 0.2}
_HYBRID = {
    "layers.mixer": ("mamba", "attention", "none", "none"), "layers.mlp": ("none", "none", "dense", "experts"), "mlp.activation": "relu2",
    "mlp.gated": False, "positions.kind": "none", "mamba.heads": 4, "mamba.head_dim": 6, "mamba.groups": 2, "mamba.state": 5,
    "experts.score": "sigmoid", "experts.router_bias": True, "experts.shared_ffn": 24,
}  # fmt: skip
_MAMBA_ALONE = {
    "layers.mixer": "mamba", "layers.mlp": "none", "positions.kind": "none", "mamba.heads": 4, "mamba.head_dim": 6, "mamba.groups": 2,
    "mamba.state": 5,
}  # fmt: skip
_DELTA_NETS = {
    "layers.mixer": ("linear", "linear", "attention", "linear"), "attention.qk_norm": True, "attention.output_gate": True,
    "norm.zero_centered": True, "positions.rotary_percent": 0.5, "linear.key_heads": 2, "linear.value_heads": 4, "linear.key_dim": 4,
    "linear.value_dim": 6, "linear.conv": 3,
}  # fmt: skip
MODELS = {
    "mamba": from_fields("mamba2", {**SIZES, **_MAMBA_ALONE}),
    "hybrid": from_fields("nemotron_h", {**SIZES, **_EXPERTS, **_HYBRID}),
    "hybrid, further tokens": from_fields(
        "nemotron_h", {**SIZES, **_EXPERTS, **_HYBRID, "experts.latent": 12, "mtp_layers": 1}
    ),
    "delta nets": from_fields("qwen3_5", {**SIZES, **_DELTA_NETS}),
    "delta nets, experts": from_fields(
        "qwen3_next",
        {
            **SIZES,
            **_EXPERTS,
            **_DELTA_NETS,
            "experts.shared_ffn": 24,
            "experts.shared_gate": True,
            "mtp_layers": 1,
        },
    ),
    "falcon h1": from_fields("falcon_h1", {**SIZES, **_FALCON_H1}),
    "kimi": from_fields("kimi_linear", {**SIZES, **_EXPERTS, **_KIMI}),
    "qwen3": from_fields("qwen3", {"attention.qk_norm": True, **SIZES}),
    "llama": from_fields("llama", {**_BIASES, "tie_embeddings": True, **SIZES}),
    "gpt2": from_fields(
        "gpt2", {**_GPT2, **_BIASES, "tie_embeddings": True, **SIZES, "attention.kv_heads": 4}
    ),
    "mixtral": from_fields("mixtral", {**_EXPERTS, **SIZES}),
    "deepseek_v3": from_fields("deepseek_v3", {**SIZES, **_EXPERTS, **_LATENT}),
    "further tokens": from_fields("deepseek_v3", {**SIZES, **_EXPERTS, **_LATENT, "mtp_layers": 2}),
    "further tokens, tied": from_fields(
        "deepseek_v3", {**SIZES, **_EXPERTS, **_LATENT, "mtp_layers": 2, "tie_embeddings": True}
    ),
    "deepseek_v32": from_fields("deepseek_v32", {**SIZES, **_EXPERTS, **_LATENT, **_SPARSE}),
    "llama4": from_fields("llama4", {**SIZES, **_EXPERTS, **_LLAMA_4}),
    "gemma2": from_fields("gemma2", {**SIZES, **_GEMMA_2, "tie_embeddings": True}),
    "gpt_oss": from_fields("gpt_oss", {**_BIASES, **SIZES, **_EXPERTS, **_SINKS}),
    "gemma3": from_fields("gemma3_text", {**SIZES, **_GEMMA_3, "tie_embeddings": True}),
    "gemma4, layer inputs": from_fields(
        "gemma4_text", {**SIZES, **_GEMMA_4, **_CARRIED, "tie_embeddings": True}
    ),
    "gemma4": from_fields("gemma4_text", {**SIZES, **_GEMMA_4, "tie_embeddings": True}),
    "apertus": from_fields("apertus", {**SIZES, **_APERTUS}),
    "mimo": from_fields("mimo", {**SIZES, "attention.qkv_bias": True, "mtp_layers": 1}),
    "nemotron_nas": from_fields("nemotron_nas", {**SIZES, **_NEMOTRON_NAS}),
    "step3p5": from_fields("step3p5", {**SIZES, **_EXPERTS, **_STEP}),
    "lfm3": from_fields("lfm3", {**SIZES, **_LFM_3, "tie_embeddings": True}),
    "laguna": from_fields("laguna", {**SIZES, **_EXPERTS, **_LAGUNA}),
    "mimo_v2_flash": from_fields("mimo_v2_flash", {**SIZES, **_EXPERTS, **_MIMO_V2}),
    "olmo2": from_fields("olmo2", {**SIZES, **_OLMO_2}),
    "mpt": from_fields("mpt", {**_GPT2, **SIZES, **_MPT, "tie_embeddings": True}),
    "beam": from_fields("beam", {**SIZES, **_EXPERTS, **_BEAM}),
    "dbrx": from_fields("dbrx", {**SIZES, **_EXPERTS, **_DBRX}),
    "gpt1": from_fields(
        "openai_gpt",
        {
            **_GPT2,
            **_BIASES,
            **SIZES,
            "attention.kv_heads": 4,
            "norm.place": "after_sum",
            "norm.final": False,
            "tie_embeddings": True,
        },
    ),
    "gpt2, untied": from_fields("gpt2", {**_GPT2, **_BIASES, **SIZES, "attention.kv_heads": 4}),
}


@dataclass(frozen=True)
class Case:
    """A run. Everything else is the same for all of them."""

    model: str = "qwen3"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False
    recompute: Recompute = NONE
    clip: float = 1.0
    steps: int = 20
    masked: bool = True
    """True if some labels don't count, and sequences consist of documents."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further fields of ModelOptions."""
    kind: str = "adamw"
    muon: MuonOptions = MUON
    qk_clip: QkClip | None = None
    ep: int = 1
    zero: int = 1
    """The sharding stage if `distributed`: 2 shards gradients too, 3 also parameters."""
    moments: tuple[str, str] = ("float32", "float32")
    """The dtypes of Adam's two moments."""
    main_grads: str = "float32"
    """The dtype in which gradients are summed."""
    fuses: bool = True
    """Add gradients of matrices to their sums inside the products."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        words = [
            f"{name}{getattr(self, name)}"
            for name in ("tp", "pp", "vpp", "dp", "cp", "ep")
            if getattr(self, name) > 1
        ]
        words += [
            word
            for word, said in (
                ("sp", self.sequence_parallel),
                (f"zero{self.zero}".removesuffix("1"), self.distributed),
            )
            if said
        ]
        if self.recompute.granularity:
            words.append(self.recompute.granularity + (" block" if self.recompute == BLOCK else ""))
        return " ".join(
            [
                self.model,
                *words,
                *map(str, self.options),
                *([self.kind] if self.kind != "adamw" else []),
            ]
        )

    def alone(self) -> "Case":
        """The same in one process."""
        options = tuple(option for option in self.options if option[0] not in ("context", "near"))
        return replace(
            self,
            tp=1,
            pp=1,
            vpp=1,
            dp=1,
            cp=1,
            ep=1,
            sequence_parallel=False,
            distributed=False,
            zero=1,
            recompute=NONE,
            options=options,
        )


CPU = torch.device("cpu")


def make_engine(
    case: Case,
    *,
    overlap: bool = True,
    bucket_elements: int = 4000,
    device: torch.device = CPU,
    bf16_reduce: bool = False,
    config: ModelConfig | None = None,
    criterion: Criterion = OWN_LOSS,
) -> Engine:
    """Make a rank's engine with random weights. config: by default that of the case's model."""
    config = MODELS[case.model] if config is None else config
    layout = Layout(
        case.tp,
        case.pp,
        case.vpp,
        case.ep,
        stage_layers=split_layers(config.layer_count, case.pp, case.vpp, LayerSplit()),
    )
    options = ModelOptions(
        **{
            "dtype": "float32",
            "sequence_parallel": case.sequence_parallel,
            "recompute": case.recompute,
            "vocab_divisor": 4,
            **dict(case.options),
        }
    )
    optimizer = OptimizerOptions(
        kind=case.kind,
        muon=case.muon,
        qk_clip=case.qk_clip,
        betas=(0.9, 0.95),
        clip_grad=case.clip,
        distributed=case.distributed,
        shards_gradients=case.zero > 1,
        shards_parameters=case.zero > 2,
        fuses_accumulation=case.fuses,
        exp_avg_dtype=case.moments[0],
        exp_avg_sq_dtype=case.moments[1],
        main_grads_dtype=case.main_grads,
        bucket_elements=bucket_elements,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bf16_reduce=bf16_reduce,
    )
    microbatches = MICROBATCHES // case.dp
    dp = check_sizes(
        config,
        layout,
        world=case.world,
        options=options,
        sequence=SEQUENCE,
        microbatches=microbatches,
        cp=case.cp,
    )
    engine = Engine(
        config,
        make_grid(
            layout, dp, device, cp=case.cp, near=options.near, experts=config.experts.count > 0
        ),
        options,
        optimizer,
        criterion,
    )
    init_weights(engine, std=0.1, seed=5)
    return engine


def batches(case: Case, step: int) -> Iterator[Microbatch]:
    """The step's microbatches, the same at every layout."""
    generator = torch.Generator().manual_seed(step)
    vocab = MODELS[case.model].vocab
    for index in range(MICROBATCHES):
        tokens = torch.randint(vocab, (ROWS, SEQUENCE + 1), generator=generator)
        mask = torch.rand(ROWS, SEQUENCE, generator=generator) < 0.8 if case.masked else None
        documents = ((5, 11), (16,)) if case.masked and index == 1 else None
        yield Microbatch(tokens[:, :-1], tokens[:, 1:], mask, documents=documents, index=index)


def own_batches(case: Case, step: int, engine: Engine) -> list[Microbatch]:
    """The microbatches of this data-parallel rank."""
    return list(batches(case, step))[engine.grid.dp_rank :: case.dp]


@dataclass(frozen=True)
class Trained:
    """The result of a run on one rank."""

    reports: list[StepReport]
    weights: dict[str, torch.Tensor]
    """This rank's, by their names with layers counted over the whole model."""

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """The weights by names with layers counted over the whole model."""
    firsts = [chunk.first_layer for chunk in engine.grid.chunks()]
    return {
        whole_name(name, firsts[chunk]): tensor.clone()
        for chunk, name, tensor in engine.parameters()
    }


def whole_name(name: str, first_layer: int) -> str:
    return re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first_layer}", name)


def step(engine: Engine, case: Case, number: int) -> StepReport:
    """Learning rate and decay move, as they do in a real run."""
    return engine.train_step(
        own_batches(case, number, engine), lr=1e-3 * (1 - number / 100), weight_decay=0.1
    )


def train(_rank: int, case: Case) -> Trained:
    """Train on one rank."""
    engine = make_engine(case)
    reports = [step(engine, case, number) for number in range(case.steps)]
    engine.finish()
    engine.grid.close()
    return Trained(reports, weights_of(engine))


def saved_bytes(engine: Engine, batch: Microbatch) -> int:
    """The bytes that autograd keeps of one forward pass through the only chunk, without parameters, each storage
    once."""
    parameters = {tensor.untyped_storage().data_ptr() for _, _, tensor in engine.parameters()}
    storages: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.chunks[0]((), engine.make_pass(batch))
    return sum(storages.values())
