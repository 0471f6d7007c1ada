"""Writes and reads the parts of a checkpoint that are not tensors: Megatron's args, scheduler and parameter groups.

The restricted reader of torch files reads them, so a checkpoint from elsewhere can't execute code.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from formats import rank_files, torch_zip
from formats.errors import CorruptCheckpoint
from megaconv.families.parts.dropouts import dropouts_of
from megaconv.megatron.arguments.latent import latent_norm_argument
from megaconv.megatron.arguments.mamba import time_step_argument
from megaconv.megatron.arguments.param_groups import write_group, write_order
from megaconv.megatron.arguments.write import to_arguments
from megaconv.megatron.states.origin import TRAINER
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.training import ParamGroup, TrainingState
from megatron_lite.optimizer.algorithms import algorithm
from megatron_lite.settings.config import Settings
from megatron_lite.settings.run_options import optimizer_options
from megatron_lite.settings.sizes import Sizes

Rates = tuple[float, float, float | None]
"""Learning rate, weight decay, and the learning rate of embedding and head if they have a separate one."""

_ENUMERATIONS = ("attention_backend",)
"""Flags that are members of an enumeration in Megatron's args. Megatron would take their name for another value."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    """Samples of the steps that were not skipped. They determine the learning rate."""
    consumed_valid_samples: int = 0
    flops: float = 0.0
    engine: Mapping[str, Any] | None = None
    """Engine.state(): number of updates and loss scale. In a checkpoint also FP8 histories (amax.py). None: a new optimizer."""
    data: str | None = None
    """TrainingData.identity() of the run that saved the checkpoint."""
    best_iteration: int | None = None
    """The iteration with the lowest validation loss; None before the first evaluation."""
    best_loss: float | None = None
    best_by: str | None = None
    """The objective and the data of these evaluations, as a hash (loop/best.py)."""
    evaluations_since_best: int = 0

    @property
    def updates(self) -> int:
        """Number of updates by the optimizer."""
        return int(self.engine["optimizer"].get("steps", 0)) if self.engine else 0


def common_state(
    settings: Settings, config: ModelConfig, sizes: Sizes, dropouts: Mapping[str, float], progress: Progress,
    scheduler: Mapping[str, Any], rates: Rates, *, with_optimizer: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the content of common.pt, which every rank file contains too. rates: the current rates."""
    import torch

    divisor, layout = settings.model.make_vocab_size_divisible_by, sizes.layout
    if layout.split_rank:  # torch_dist has no stages, and Megatron's T5 that reads it has one stage
        layout = Layout(layout.tp, stage_layers=(config.layer_count,))
    arguments = _plain_settings(settings) | to_arguments(
        config, layout, TrainingState(progress.iteration), transformer_impl=settings.checkpointing.transformer_impl,
        grouped_experts=False, vocab_divisor=divisor, padded_vocab=padded_vocab(config.vocab, divisor, sizes.layout.tp),
        beside_config=True,
    )  # fmt: skip
    arguments |= dict(dropouts) | latent_norm_argument(config) | time_step_argument(config)
    arguments["params_dtype"] = getattr(torch, arguments["params_dtype"])
    arguments |= _of_run(settings, sizes, progress)
    arguments["no_save_optim"] = True if not with_optimizer else None
    arguments["no_save_rng"] = True  # there is no generator state: seed and step determine dropout
    state: dict[str, Any] = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "opt_param_scheduler": dict(scheduler),
        "num_floating_point_operations_so_far": progress.flops,
        TRAINER: asdict(progress),  # only this trainer needs it, to continue bit by bit
    }
    if with_optimizer:
        state["optimizer"] = {
            "optimizer": {"param_groups": param_groups(settings, progress, rates)},
            **_grad_scaler(config, progress),
        }
    return state


def _of_run(settings: Settings, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Return the arguments that follow from the sizes and the progress of the run."""
    found: dict[str, Any] = {
        "consumed_train_samples": progress.consumed_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "skipped_train_samples": progress.consumed_samples - progress.scheduled_samples,
        "data_parallel_size": sizes.dp,
        "context_parallel_size": sizes.cp,
        "world_size": sizes.dp * sizes.cp * sizes.layout.tp * sizes.layout.pp,
        "sequence_parallel": settings.parallel.sequence_parallel,
        "seq_length": sizes.seq,
    }
    if sizes.decoder_seq:
        found["encoder_seq_length"] = sizes.seq
        found["decoder_seq_length"] = sizes.decoder_seq
    found["ckpt_format"] = settings.checkpointing.ckpt_format
    found["global_batch_size"] = sizes.batch.full
    return found


def _plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the flags, in the form of Megatron's args."""
    from megatron_lite.settings.config import subjects

    return {
        name: list(value) if isinstance(value, tuple) else value
        for subject in subjects()
        for name, value in vars(getattr(settings, subject)).items()
        if name not in _ENUMERATIONS
    }


def param_groups(settings: Settings, progress: Progress, rates: Rates) -> list[dict[str, Any]]:
    """Return Megatron's parameter groups: with weight decay, without it (norms and biases), and for embedding and head.

    The last group exists only if embedding and head have a separate learning rate.
    """
    lr, decay, decoupled_lr = rates
    chosen = settings.optimizer
    options = optimizer_options(settings)
    own: dict[str, Any] = dict(algorithm(options).recorded(options))
    own |= {"max_lr": chosen.lr, "min_lr": chosen.min_lr, "lr": lr}
    groups = [
        ParamGroup(
            wd_mult, 1.0, decoupled_lr=False, settings={**own, "weight_decay": decay * wd_mult}
        )
        for wd_mult in (1.0, 0.0)
    ]
    if decoupled_lr is not None:
        lowest = chosen.min_lr if chosen.decoupled_min_lr is None else chosen.decoupled_min_lr
        own |= {
            "max_lr": chosen.decoupled_lr,
            "min_lr": lowest,
            "lr": decoupled_lr,
            "weight_decay": decay,
        }
        groups.append(ParamGroup(1.0, 1.0, decoupled_lr=True, settings=own))
    return [
        write_group(groups[index], expert=False, step=progress.updates)
        for index in write_order(groups)
    ]


def _grad_scaler(config: ModelConfig, progress: Progress) -> dict[str, Any]:
    """Return fp16's loss scale as Megatron's dynamic scaler writes it; {} for other dtypes."""
    if config.dtype != "float16" or progress.engine is None:
        return {}
    import torch

    scaler = progress.engine["scaler"]
    trackers = {
        "growth_tracker": scaler["good_steps"],
        "hysteresis_tracker": scaler["overflows_left"],
    }
    return {"grad_scaler": {"scale": torch.tensor([float(scaler["scale"])]), **trackers}}


def read_common(path: Path) -> Mapping[str, Any] | None:
    """Return the values that are not tensors of the checkpoint at `path`; None if Megatron did not write it.

    Raises CorruptCheckpoint.
    """
    version = rank_files.find_version(path)
    if version is None:
        return None
    if (version / "common.pt").is_file():
        file = version / "common.pt"
    elif rank_files.is_rank_files(version):
        file = next(iter(rank_files.read(version).files.values()))
    else:
        return None
    state = torch_zip.read(file)
    if not isinstance(state, dict):
        raise CorruptCheckpoint(f"{file}: should hold a dictionary, found a {type(state).__name__}")
    return state


def read_progress(common: Mapping[str, Any] | None, training: TrainingState) -> Progress:
    """Return the progress: complete from this trainer's checkpoints, from others the values that megaconv finds."""
    if common is not None and isinstance(common.get(TRAINER), dict):
        return Progress(**common[TRAINER])
    iteration = training.iteration or 0
    consumed = training.consumed_train_samples
    optimizer = training.optimizer
    scheduled = (training.scheduler or {}).get("num_steps", consumed)
    flops = float(training.floating_point_operations)
    if training.release:
        # A new run: as in Megatron, it starts at step 0 with a new optimizer and scheduler.
        return Progress(0, consumed, consumed, training.consumed_valid_samples, flops)
    if optimizer is None:
        return Progress(iteration, consumed, scheduled, training.consumed_valid_samples, flops)
    step = iteration if optimizer.step is None else optimizer.step
    engine = {
        "step": iteration,
        "optimizer": {"steps": step},
        "scaler": _read_grad_scaler(optimizer.grad_scaler or {}),
    }
    return Progress(iteration, consumed, scheduled, training.consumed_valid_samples, flops, engine)


def _read_grad_scaler(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of Megatron's dynamic loss scaler. Returns {} without a scaler or with a constant scale."""
    if "scale" not in scaler:
        return {}
    left = scaler.get("hysteresis_tracker", 1)
    return {
        "scale": float(scaler["scale"]),
        "good_steps": scaler.get("growth_tracker", 0),
        "overflows_left": left,
    }


def read_arguments(common: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Megatron's args, or {} if there are none."""
    return vars(common["args"]) if common and isinstance(common.get("args"), Namespace) else {}


def read_dropouts(common: Mapping[str, Any] | None, config: ModelConfig) -> dict[str, float]:
    """Return attention_dropout and hidden_dropout of the checkpoint: its run's, or else those of its config.json."""
    args = read_arguments(common)
    return {
        name: float(args.get(name, value) or 0.0) for name, value in dropouts_of(config).items()
    }
