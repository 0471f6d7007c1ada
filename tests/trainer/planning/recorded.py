"""The cost of one real step: bytes of every collective by group, bytes that forward passes keep, bytes of all that
stays."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed, from_fields
from megaconv.model.layout import LayerSplit, Layout, split_layers, split_stacks
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models import recompute, scored_attention
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.bert import SWAPPED_PARTS
from megatron_lite.models.criterion import OWN_LOSS, Criterion
from megatron_lite.objectives.contrastive_loss import DOCUMENTS, QUERIES, ContrastiveLoss
from megatron_lite.objectives.pair_loss import REFERENCE, PairLoss, Preference
from megatron_lite.objectives.score_loss import ScoreLoss
from megatron_lite.objectives.scored_model import SCORED
from megatron_lite.objectives.taught import TeacherLoss
from megatron_lite.objectives.teacher import teacher_engine, with_teaching
from megatron_lite.optimizer import narrow_update
from megatron_lite.optimizer.algorithm import BLOCK
from megatron_lite.parallel import comm, tensor
from megatron_lite.parallel.grid import make_grid
from megatron_lite.planning.stages import Described
from megatron_lite.planning.work import EMBEDDING_LOSSES, TEACHER_LOSSES, Work, taught_sums
from megatron_lite.settings.batch_size import BatchSize
from megatron_lite.settings.options import (
    Balancing,
    Distillation,
    LoRA,
    ModelOptions,
    OptimizerOptions,
    Recompute,
)
from megatron_lite.settings.sizes import Sizes
from tests.trainer.parallel.small import MODELS as DECODERS
from tests.trainer.parallel.small import NONE
from tests.trainer.parallel.test_bert import CONFIG as BERT
from tests.trainer.parallel.test_encoder_decoders import CONFIG as T5

SEQUENCE = 16
MIXTURE = from_fields(
    "qwen2_moe",
    {
        "layers.count": 4, "layers.mlp": ("dense", "experts", "experts", "experts"), "hidden": 32, "attention.heads": 4,
        "attention.kv_heads": 2, "attention.head_dim": 8, "mlp.ffn": 48, "vocab": 61, "max_positions": 32,
        "norm.epsilon": 1e-5, "positions.theta": 5000.0, "experts.count": 4, "experts.per_token": 2, "experts.ffn": 24,
        "experts.shared_ffn": 40, "experts.shared_gate": True, "experts.renormalize": False,
    },
)  # fmt: skip


MODELS = {
    **DECODERS,
    "mixture": MIXTURE,
    "bert": BERT,
    "t5": T5,
    "latent, wide values": changed(DECODERS["deepseek_v3"], {"latent.v_dim": 32}),
    "llama, scores": changed(DECODERS["llama"], SCORED),
}
SOURCE_SEQUENCE = 24
"""Tokens that T5's encoder reads; its decoder has SEQUENCE."""


@dataclass(frozen=True)
class Planned:
    """A small run. Everything else is the same for all of them."""

    model: str = "qwen3"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    cp: int = 1
    context: str = "p2p"
    near: int = 1
    dispatcher: str = "alltoall"
    padded_to: float | None = None
    """The capacity factor that experts are padded to."""
    kind: str = "adamw"
    sequence: bool = False
    distributed: bool = False
    zero: int = 1
    """The sharding stage if `distributed`: 2 shards gradients too, 3 also parameters."""
    recompute: Recompute = NONE
    dtype: str = "float32"
    main_grads: str = "float32"
    """The dtype in which gradients are summed."""
    moments: str = "float32"
    """The dtype in which Adam's moments are kept."""
    block: int = BLOCK
    """Elements whose gradients and moments exist in float32 at a time."""
    microbatches: int = 2
    encoder_stages: int = 0
    """T5: stages of the encoder's own."""
    lora: LoRA | None = None
    """Only adapters are trained."""
    pairs: bool = False
    """The two rows of a microbatch are a pair of answers (DPO)."""
    vectors: bool = False
    """The two rows of a microbatch are a query and its document, whose vectors are compared."""
    teacher: str | None = None
    """The model whose predictions are learned."""
    beta: float = 0.0
    """The kind of divergence from the teacher."""
    wider: int = 1
    """Times which the model is as wide."""

    @property
    def config(self) -> ModelConfig:
        found = MODELS[self.model]
        wide = {
            "hidden": found.hidden * self.wider,
            "mlp.ffn": found.mlp.ffn * self.wider,
            "vocab": found.vocab * self.wider,
        }
        wide["attention.head_dim"] = found.attention.head_dim * self.wider
        return changed(found, wide) if self.wider > 1 else found

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def balance(self) -> Balancing:
        losses = (("aux_loss", 1e-2), ("seq_aux_loss", 1e-2))
        pads = self.padded_to is not None
        return Balancing(losses, 1e-3, capacity_factor=self.padded_to, pads=pads)

    def described(self) -> Described:
        config = self.config
        of_encoder: tuple[int, ...] = ()
        if self.encoder_stages:
            of_encoder, stage_layers = split_stacks(
                config.encoder.layers, config.layer_count, self.pp, self.encoder_stages
            )
        else:
            stage_layers = split_layers(config.layer_count, self.pp, self.vpp, LayerSplit())
        layout = Layout(
            self.tp,
            self.pp,
            self.vpp,
            self.ep,
            self.etp,
            stage_layers=stage_layers,
            encoder_stage_layers=of_encoder,
        )
        options = ModelOptions(
            self.dtype, sequence_parallel=self.sequence, recompute=self.recompute, vocab_divisor=4,
            balance=self.balance, context=self.context, near=self.near,
            dispatcher=self.dispatcher, lora=self.lora,
        )  # fmt: skip
        optimizer = OptimizerOptions(
            self.kind,
            distributed=self.distributed,
            shards_gradients=self.zero > 1,
            shards_parameters=self.zero > 2,
            main_grads_dtype=self.main_grads,
            exp_avg_dtype=self.moments,
            exp_avg_sq_dtype=self.moments,
            bucket_elements=4000,
        )
        samples = (2 // self.work.rows) * self.microbatches * self.dp
        batch = BatchSize(samples, samples)
        two_stacks = config.encoder.layers > 0
        sizes = Sizes(
            layout=layout, dp=self.dp, batch=batch, micro_batch=2 // self.work.rows, cp=self.cp,
            seq=SOURCE_SEQUENCE if two_stacks else SEQUENCE, decoder_seq=SEQUENCE if two_stacks else 0,
        )  # fmt: skip
        described = Described(config, sizes, options, optimizer, self.work)
        return described if self.teacher is None else described.taught_by(MODELS[self.teacher])

    @property
    def work(self) -> Work:
        if self.pairs:
            return Work(rows=2, rests_mtp=True, head_again=True, losses=5)
        if self.vectors:
            return Work(rows=2, rests_mtp=True, rests_head=True, losses=EMBEDDING_LOSSES)
        if self.teacher is not None:
            sums = taught_sums(self.beta)
            return Work(rests_mtp=True, losses=TEACHER_LOSSES, taught_sums=sums)
        return Work()

    def __str__(self) -> str:
        plain = Planned()
        return (
            " ".join(
                f"{name} {value}"
                for name, value in vars(self).items()
                if value != getattr(plain, name)
            )
            or "plain"
        )


def make_engine(planned: Planned) -> Engine:
    run = planned.described()
    grid = make_grid(
        run.sizes.layout,
        run.sizes.dp,
        torch.device("cpu"),
        cp=run.sizes.cp,
        near=planned.near,
        experts=run.config.experts.count > 0,
    )
    criterion = _criterion(planned)
    engine = Engine(run.config, grid, run.options, run.optimizer, criterion)
    init_weights(engine, 0.1, 5)
    return engine


def _criterion(planned: Planned) -> Criterion:
    if planned.pairs:
        return PairLoss(Preference())
    if planned.vectors:
        return ContrastiveLoss()
    if planned.teacher is not None:
        return TeacherLoss(Distillation(0.5, 1.0, planned.beta))
    return ScoreLoss() if planned.config.has("scores") else OWN_LOSS


def step(engine: Engine, planned: Planned) -> None:
    """One step on random tokens."""
    batches = _batches(engine, planned)
    if planned.teacher is not None:
        batches = with_teaching(make_teacher(engine, planned), batches)
    engine.train_step(batches, 1e-3, 0.1, (0.0, 0.0))
    engine.finish()


def make_teacher(student: Engine, planned: Planned) -> Engine:
    assert planned.teacher is not None
    config = MODELS[planned.teacher]
    return teacher_engine(student, config, initial_weights(config, 0.1, 9))


def _batches(engine: Engine, planned: Planned) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(engine.grid.dp_rank)
    tokens = torch.randint(
        engine.config.vocab, (planned.microbatches, 2, SEQUENCE + 1), generator=generator
    )
    return [
        Microbatch(rows[:, :-1], rows[:, 1:], index=index, **_of_family(engine, rows))
        for index, rows in enumerate(tokens)
    ]


def _of_family(engine: Engine, rows: torch.Tensor) -> dict[str, Any]:
    """The fields of a microbatch of a BERT, a T5, a reward model or a pair, beside tokens and labels."""
    if isinstance(engine.criterion, PairLoss):
        return {"extras": {REFERENCE: torch.zeros(2, dtype=torch.float64)}}
    if isinstance(engine.criterion, ContrastiveLoss):
        last = torch.arange(SEQUENCE).expand(2, -1) == SEQUENCE - 1
        number = rows[:1, 0]
        return {"loss_mask": last.float(), "extras": {QUERIES: number, DOCUMENTS: number[:, None]}}
    if engine.config.family == "bert":
        types, seen = torch.zeros_like(rows[:, 1:]), torch.ones_like(rows[:, 1:], dtype=torch.bool)
        return {"types": types, "visible": seen, "extras": {SWAPPED_PARTS: rows[:, 0] % 2}}
    if engine.config.has("scores"):
        return {"loss_mask": torch.arange(SEQUENCE).expand(2, -1) == SEQUENCE - 1}
    if engine.config.family == "t5":
        return {"source": rows[:, :1].repeat(1, SOURCE_SEQUENCE)}
    return {}


def traffic_of_a_step(
    _rank: int, planned: Planned
) -> tuple[int, dict[tuple[str, str], int], dict[str, str]]:
    """(pipeline rank, bytes by group and kind, what groups are called: of the same ranks one name)."""
    engine = make_engine(planned)
    with _recording(engine) as counted:
        step(engine, planned)
    pp_rank = engine.grid.pp_rank
    names = _names(engine)
    called = {axis: names[group] for axis, group in engine.grid.groups.items() if group is not None}
    engine.grid.close()
    return pp_rank, dict(counted), called


def _names(engine: Engine) -> dict[Any, str]:
    channels = dict.fromkeys(engine.grid.channels.values(), "pp")
    return {group: axis for axis, group in reversed(list(engine.grid.groups.items()))} | channels


@contextmanager
def _recording(engine: Engine) -> Iterator[Counter[tuple[str, str]]]:
    """Every function of comm.py that moves anything counts it before."""
    counted: Counter[tuple[str, str]] = Counter()
    names = _names(engine)

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.itemsize

    sizes = {
        "all_reduce": lambda tensor, group, **_: (group, size(tensor)),
        "reduce_scatter": lambda part, whole, group, **_: (group, size(whole)),
        "all_gather": lambda whole, part, group, **_: (group, size(whole)),
        "all_to_all": lambda rows, group, *_: (group, size(rows)),
        "send": lambda tensor, rank, group, tag: (group, size(tensor)),
        "shift": lambda tensor, group, **_: (group, size(tensor)),
        "reduce_to_owners": lambda whole, bounds, group: (group, size(whole)),
        "gather_from_owners": lambda whole, bounds, group: (group, size(whole)),
    }
    same = {
        "shift": "send",
        "reduce_to_owners": "reduce_scatter",
        "gather_from_owners": "all_gather",
    }
    functions = {kind: "exchange" if kind == "all_to_all" else kind for kind in sizes}
    before = {name: getattr(comm, name) for name in functions.values()}

    def counting(kind: str, function: Any) -> Any:
        def counts(*arguments: Any, **named: Any) -> Any:
            group, found = sizes[kind](*arguments, **named)  # type: ignore[no-untyped-call]
            if group is not None:
                counted[names[group], same.get(kind, kind)] += found
            return function(*arguments, **named)

        return counts

    for kind, name in functions.items():
        setattr(comm, name, counting(kind, before[name]))
    try:
        yield counted
    finally:
        for name, function in before.items():
            setattr(comm, name, function)


def bytes_kept(_rank: int, planned: Planned) -> tuple[int, int]:
    """(pipeline rank, bytes of parameters, gradients and optimizer state: all tensors that are alive after a step)."""
    gc.collect()
    before = tensor_bytes()
    with mock.patch.object(narrow_update, "BLOCK", planned.block):
        engine = make_engine(planned)
    step(engine, planned)
    gc.collect()
    found = engine.grid.pp_rank, tensor_bytes() - before
    engine.grid.close()
    return found


def tensor_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        kind = type(item)
        is_in_memory = issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
        if is_in_memory and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_of_a_pass_by(_rank: int, planned: Planned) -> int:
    """The bytes that a pass keeps. The norm is the one for many rows: the norm for few rows, as in half of a small
    batch, keeps more."""
    with mock.patch.object(tensor, "FEW_ROWS", 0):
        return bytes_of_a_pass(planned)


def bytes_of_a_pass(planned: Planned) -> int:
    """The bytes that a forward pass keeps for its backward pass, without parameters, each storage once.

    Attention by scores computes them again in blocks, as for sequences of a usual length.
    """
    engine = make_engine(replace(planned, microbatches=1))
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    def hooks_inside(pack: Any, unpack: Any) -> Any:
        """The hooks of recomputation, which hide those outside: what they keep as it is counts."""

        def packed(tensor: torch.Tensor) -> Any:
            made = pack(tensor)
            return keep(made) if isinstance(made, torch.Tensor) else made

        return saved_tensors_hooks(packed, unpack)

    alive: list[torch.Tensor] = []
    inside = mock.patch.object(recompute, "saved_tensors_hooks", hooks_inside)
    blocks = mock.patch.object(scored_attention, "BLOCK", SEQUENCE // 2)
    with saved_tensors_hooks(keep, lambda tensor: tensor), inside, blocks:
        step(engine, replace(planned, microbatches=1))
    for parameter in engine.chunks[0].parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    engine.grid.close()
    return sum(storages.values())
