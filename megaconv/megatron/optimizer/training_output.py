"""The state that a run needs to continue from a Megatron output: optimizer, scheduler, random-number generators."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from formats.pickle_records import NumpyArray
from formats.pickle_writer import Constant
from formats.tensor import read_tensor
from megaconv.errors import CheckpointError, NotExpressible, UsageError
from megaconv.megatron.arguments.param_groups import WITHOUT
from megaconv.megatron.optimizer.plan import OptimizerWriter
from megaconv.model.ir import Header
from megaconv.model.layout import Layout
from megaconv.model.training import ADAM, MOMENTUM, TrainingState
from megaconv.options import SaveOptions

_OTHER_FORM = "the source's run has --use-distributed-optimizer, and the output's optimizer state is for runs without it: "
_ASK_FOR_IT = "give convert --use-distributed-optimizer too if the next run has it"
_NOT_IN_ZARR = "zarr checkpoints have no other form, so leave the flag out of the next run, or write another format"
ENCODER_STAGES = (
    "if an encoder has separate pipeline stages, Megatron's distributed optimizer lays out copies of the embedding in a way "
    "that is not supported: its state is neither read nor written"
)
MUON = (
    "the optimizer's state is Muon's, a momentum of some tensors and Adam's moments of the others: no output has a place for both yet "
    "(training goes on from the checkpoint as it is, at any layout)"
)
NO_SCHEDULER = (
    "the source has no scheduler's state (opt_param_scheduler), without which Megatron-LM's training script doesn't load the "
    "optimizer either: start it with --no-load-optim"
)
OTHER_SCHEDULER = (
    "Megatron's scheduler can't represent the source's learning-rate schedule: start the run with "
    "--override-opt-param-scheduler and your own settings, which then go on from the samples seen"
)

_PLAIN = (type(None), bool, int, float, str, NumpyArray)


@dataclass(frozen=True)
class OutputTraining:
    """The converted training state. It is empty without an optimizer: a run can't continue from weights alone."""

    training: TrainingState
    writer: OptimizerWriter | None = None
    rng: Mapping[tuple[int, int, int], Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def state(self, rank: tuple[int, int, int] | None, optimizer: Any) -> dict[str, Any]:
        """The entries of one rank file, or for rank None the entries that all ranks share."""
        if self.writer is None:
            return {}
        found = {"optimizer": optimizer}
        if self.training.scheduler is not None:
            found["opt_param_scheduler"] = dict(self.training.scheduler)
        return found | (
            {"rng_state": self.rng[rank]} if rank is not None and rank in self.rng else {}
        )

    def arguments(self, *, distributed: bool) -> dict[str, Any]:
        """Megatron's arguments about the training state. A run's own argument stays if it has the same meaning."""
        if self.writer is None:
            return {}
        run = self.training.arguments
        says = {
            "no_save_optim": False,
            "no_save_rng": not self.rng,
            "use_distributed_optimizer": distributed,
        }
        if distributed or "overlap_grad_reduce" not in run:
            says["overlap_grad_reduce"] = (
                False  # a run with overlap has several buckets, but only one is written
            )
        same = {
            name: run[name]
            for name, value in says.items()
            if name in run and bool(run[name]) == value
        }
        in_fp32 = {"accumulate_allreduce_grads_in_fp32": not self.writer.fp16}
        return {**({} if in_fp32.keys() <= run.keys() else in_fp32), **says, **same}


def output_training(
    header: Header, layout: Layout, *, keeps_rng: bool, distributed: bool
) -> OutputTraining:
    """The training state that an output at this layout takes over from its source.

    keeps_rng: True if its format can hold RNG states. distributed: True if the distributed optimizer's form was
    requested.
    Raises NotExpressible for a layout whose distributed form isn't known, for Muon's state, and for state that the
    source marks as unsupported; UsageError for an optimizer that the output can't hold.
    """
    training = header.training
    if training.optimizer is None or not header.carries_optimizer:
        return OutputTraining(training)
    if layout.encoder_stage_layers and distributed:
        raise NotExpressible(f"{ENCODER_STAGES}; {WITHOUT}")
    if training.optimizer.unsupported:
        raise NotExpressible(f"{header.source}: {training.optimizer.unsupported}; {WITHOUT}")
    if {MOMENTUM, *ADAM} <= {key.slot for key in header.manifest}:
        raise NotExpressible(f"{MUON}; {WITHOUT}")
    several = layout.ep > 1 and header.config.experts.count > 0
    in_fp32 = bool(training.arguments.get("accumulate_allreduce_grads_in_fp32"))
    writer = OptimizerWriter(
        training.optimizer, header.manifest, several, header.config.dtype == "float16", in_fp32
    )
    if distributed and writer.moments != ADAM:
        raise UsageError(
            "--use-distributed-optimizer: Megatron's holds the state of Adam, and the source was trained with SGD; leave it out"
        )
    rng = written_rng(training.rng) if keeps_rng and layout == header.layout else {}
    notices = _scheduler_notices(training)
    if not rng:
        reason = _without_rng(at_other_layout=layout != header.layout, keeps_rng=keeps_rng)
        notices = (
            f"random-number generators are left out, because {reason}: start the run with --no-load-rng",
            *notices,
        )
    return OutputTraining(training, writer, rng, notices)


def with_form_notice(kept: OutputTraining, options: SaveOptions) -> OutputTraining:
    """The training state of an output without the form of a distributed optimizer. A notice says so if the source's run
    has one and the options don't choose a form."""
    was_distributed = kept.training.arguments.get("use_distributed_optimizer")
    if kept.writer is None or not was_distributed or options.distributed_optimizer is not None:
        return kept
    remedy = _NOT_IN_ZARR if options.ckpt_format == "zarr" else _ASK_FOR_IT
    return replace(kept, notices=(*kept.notices, _OTHER_FORM + remedy))


def _without_rng(*, at_other_layout: bool, keeps_rng: bool) -> str:
    if at_other_layout:
        return "they mean nothing at another layout"
    if not keeps_rng:
        return "a distributed checkpoint has no place for those of expert ranks"
    return "the source holds none that can be written"


def _scheduler_notices(training: TrainingState) -> tuple[str, ...]:
    if not training.scheduler:
        return (NO_SCHEDULER,)
    return (OTHER_SCHEDULER,) if None in training.scheduler.values() else ()


def written_rng(rng: Mapping[tuple[int, int, int], Any]) -> dict[tuple[int, int, int], Any]:
    """The RNG states with tensors as bytes. Empty if any state can't be written, such as a generator object."""
    try:
        return {rank: _constant(state) for rank, state in rng.items()}
    except (CheckpointError, TypeError):
        return {}


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _constant(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_constant(inner) for inner in value)
    if isinstance(value, Namespace) or not (
        isinstance(value, _PLAIN) or hasattr(value, "read_into")
    ):
        raise TypeError(f"can't write a {type(value).__name__}")
    if isinstance(value, _PLAIN):
        return value
    return Constant(tuple(value.shape), value.dtype, read_tensor(value).tobytes())
