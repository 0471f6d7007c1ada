"""DeepSpeed's ZeRO checkpoints, stages 0 to 3: weights and optimizer state.

The weights are those that the module computes with. Stage 3 doesn't store these, so there they are the optimizer's fp32
weights, rounded. With --dtype fp32, the weights are the optimizer's fp32 weights. If a checkpoint stores both, they are
compared. Parameters that are not trained are stored only in the module. Names are transformers' names. The config.json
is in the directory, where the Trainer puts it, or comes from --config.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats import zero_partitions
from formats.tensor import LazyTensor
from formats.zero_partitions import ZeroCheckpoint
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import TensorMismatch, UnknownFormat, UnsupportedInput, UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.weight_files import has_weights, whole_model
from megaconv.loader import Loader
from megaconv.megatron.arguments.zero_groups import TAKE_MEGATRONS, megatron_groups
from megaconv.megatron.optimizer.master_check import CheckedMaster
from megaconv.megatron.rank_files.layer_files import holds_layer_files, open_layer_files
from megaconv.model.check import listing, well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.natives import unsharded_tensors
from megaconv.model.table import canonical_shapes
from megaconv.model.training import MASTER, OptimizerState, TrainingState
from megaconv.options import LoadOptions
from megaconv.values.cast import CastTensor

_ADVICE = (
    "Its files are of another rank, another step or another parameter; copy the checkpoint again. --no-optimizer without --dtype fp32 "
    "converts the weights that the module computed with"
)

_log = logging.getLogger("megaconv")


def detect(path: Path) -> bool:
    return path.is_dir() and not has_weights(path) and zero_partitions.find_step(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a checkpoint. Raises CheckpointError if it is incomplete, or doesn't match the configuration."""
    step = zero_partitions.find_step(path)
    if step is None:
        raise UnknownFormat(
            f"{path}: is not a DeepSpeed checkpoint; expected a global_step* directory, or a directory whose `latest` names one"
        )
    if holds_layer_files(step):
        return open_layer_files(step, options)
    directory = next(
        (
            each
            for each in (options.config, path, path.parent)
            if each and (each / CONFIG_NAME).is_file()
        ),
        None,
    )
    if directory is None:
        raise UsageError(
            f"{path}: a DeepSpeed checkpoint doesn't describe its model; give --config with the model's Hugging Face directory",
            code="config-needed",
        )
    family, config = read_config(directory / CONFIG_NAME)
    asked = options.extra.get(TAKE_MEGATRONS)
    if asked not in (None, "megatron"):
        raise UsageError(f"--option {TAKE_MEGATRONS}={asked}: choose megatron, or leave it out")
    found = zero_partitions.open_step(step)
    of_optimizer = _of_optimizer(found)
    masters = of_optimizer.get(MASTER, {})
    # An fp32 module uses its master weights, so that the order of moments is verified when they are converted as well.
    in_fp32 = options.dtype == "float32" or (found.dtype == "float32" and options.optimizer)
    weights = _weights(found, masters, in_fp32=in_fp32)
    frozen = [name for name in weights if name not in found.group_of and name not in found.shared]
    if found.slots and frozen:
        _log.warning("%s: %s: not trained, as the module has them", step, listing(frozen))
    # Megatron's checkpoints of a run that trains only a part of a model are not supported.
    wanted = options.optimizer and not frozen and set(zero_partitions.MOMENTS) <= found.slots.keys()
    slots = {
        slot: held
        for slot, held in of_optimizer.items()
        if wanted and not (in_fp32 and slot == MASTER)
    }
    config, tensors = whole_model(family, config, HF, weights, str(step), slots)
    manifest = describe(tensors)
    with well_formed(str(step)):
        training = _training(found, family, config, takes_megatrons=asked is not None)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        training=training,
        files=find_sidecars(directory),
        source=f"deepspeed, {'universal, of ' if found.universal else ''}ZeRO {_stage(found)} of {found.ranks} ranks",
        has_optimizer=bool(found.slots),
    )
    return OpenedSource(header, tensors)


def _stage(found: ZeroCheckpoint) -> str:
    return "1 or 2" if found.stage == 2 else str(found.stage)


def _of_optimizer(found: ZeroCheckpoint) -> dict[str, dict[str, LazyTensor]]:
    """The optimizer's tensors in fp32, by slot and name. Master weights are compared with the module's weights if it
    holds them."""
    slots: dict[str, dict[str, LazyTensor]] = {}
    for slot, held in found.slots.items():
        slots[slot] = {name: _in_fp32(tensor, name) for name, tensor in held.items()}
    if found.stage < 3 and MASTER in slots:
        slots[MASTER] = {
            name: _checked(found, name, master) for name, master in slots[MASTER].items()
        }
    return slots


def _in_fp32(tensor: LazyTensor, name: str) -> LazyTensor:
    return (
        tensor if tensor.dtype == "float32" else CastTensor(tensor, "float32", name, overflow=False)
    )


def _checked(found: ZeroCheckpoint, name: str, master: LazyTensor) -> CheckedMaster:
    where = found.directory
    weight = found.module.get(name)
    if weight is None:
        raise TensorMismatch(f"{where}: the optimizer trains {name}, which the module doesn't hold")
    if tuple(weight.shape) != tuple(master.shape):
        raise TensorMismatch(
            f"{where}: {name} is {list(weight.shape)} in the module, "
            f"{list(master.shape)} in the optimizer"
        )
    if weight.dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedInput(
            f"{where}: {name} is {weight.dtype}; float32, bfloat16 and float16 are trained"
        )
    return CheckedMaster(name, master, weight, _ADVICE)


def _weights(
    found: ZeroCheckpoint, masters: Mapping[str, LazyTensor], *, in_fp32: bool
) -> dict[str, LazyTensor]:
    """Weights by name, including the second names of shared tensors."""
    weights: dict[str, LazyTensor] = {}
    for name, tensor in found.module.items():
        if name in masters and in_fp32:
            weights[name] = masters[name]
        elif name in masters and found.stage == 3:
            weights[name] = CastTensor(masters[name], tensor.dtype, name, overflow=False)
        elif name not in found.shared:
            weights[name] = tensor
    return weights | {
        name: weights[owner] for name, owner in found.shared.items() if owner in weights
    }


def _training(
    found: ZeroCheckpoint, family: Family, config: ModelConfig, *, takes_megatrons: bool
) -> TrainingState:
    """The training state of a checkpoint. takes_megatrons: True if Megatron may decay other parameters than DeepSpeed
    did."""
    steps, samples = (
        int(found.state.get(name) or 0) for name in ("global_steps", "global_samples")
    )
    state = TrainingState(steps, consumed_train_samples=samples)
    if not found.slots:
        return state
    own = _groups_by_name(found, family, config)
    shapes = canonical_shapes(family.rows, config)
    made = megatron_groups(
        own, shapes, found.state.get("ds_config"), takes_megatrons=takes_megatrons
    )
    unsupported = made.unsupported
    if found.further and not unsupported:
        unsupported = f"the optimizer's state has {', '.join(found.further)} besides the moments of Megatron's Adam"
    optimizer = OptimizerState(
        f"DeepSpeed ZeRO {_stage(found)}",
        found.step,
        made.groups,
        made.group_of,
        unsupported=unsupported,
    )
    scheduler = {**dict.fromkeys(_SCHEDULE), "num_steps": samples}
    return replace(state, optimizer=optimizer, scheduler=scheduler, arguments={"optimizer": "adam"})


_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
"""Settings that Megatron's scheduler stores and DeepSpeed doesn't. A run overrides them, or stops at once, since None
differs from its own settings."""


def _groups_by_name(
    found: ZeroCheckpoint, family: Family, config: ModelConfig
) -> dict[str, Mapping[str, Any]]:
    """Canonical name of each trained tensor -> the optimizer's group."""
    return {
        name: found.groups[found.group_of[native.name]]
        for naming in (HF, HF_STACKED)
        for native in unsharded_tensors(family.rows, config, naming)
        for name in native.parts
        if native.name in found.group_of
    }


LOADER = Loader(
    name="deepspeed",
    description="DeepSpeed ZeRO 1 to 3: global_step* with *_model_states.pt and *_optim_states.pt; universal ones; "
    "layer files of pipelines",
    detect=detect,
    open=open,
    options={
        TAKE_MEGATRONS: "`megatron`: apply weight decay as Megatron does, to all matrices and no vectors, and ignore DeepSpeed's groups"
    },
    reads_files=False,
)
