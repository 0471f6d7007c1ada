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

from formats import zero_partitions
from formats.tensor import LazyTensor
from formats.wording import listing
from formats.zero_partitions import ZeroCheckpoint
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import TensorMismatch, UnknownFormat, UnsupportedInput, UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.canonical import whole_model
from megaconv.huggingface.weight_files import has_weights
from megaconv.loader import Loader
from megaconv.megatron.arguments.run_arguments import vocab_divisor
from megaconv.megatron.arguments.zero_groups import (
    GROUP_OPTIONS,
    megatron_groups,
    takes_megatrons,
    torch_groups,
)
from megaconv.megatron.optimizer.master_check import CheckedMaster
from megaconv.megatron.rank_files.layer_files import holds_layer_files, open_layer_files
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF
from megaconv.model.table import canonical_shapes
from megaconv.model.training import MASTER, OptimizerState, TrainingState
from megaconv.options import LoadOptions
from megaconv.pytorch.megatron_entry import ENTRY, with_entry
from megaconv.pytorch.progress import with_samples
from megaconv.pytorch.training_state import Parameters, in_fp32
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
    directory = _description(path, options.config)
    family, config = read_config(directory / CONFIG_NAME, own_names=options.own_names)
    if config.own_names is not None:
        return _under_own_names(step, directory, (family, config), options)
    asked = takes_megatrons(options.extra)
    found = zero_partitions.open_step(step)
    of_optimizer = _of_optimizer(found)
    masters = of_optimizer.get(MASTER, {})
    # An fp32 module uses its master weights, so that the order of moments is verified when they are converted as well.
    in_fp32 = options.dtype == "float32" or (found.dtype == "float32" and options.optimizer)
    weights = _weights(found, masters, in_fp32=in_fp32)
    parameters = Parameters.of(family, config)
    frozen = parameters.frozen(weights, {*found.group_of, *found.shared})
    if found.slots and frozen:
        _log.warning("%s: %s: not trained, as the module has them", step, listing(frozen))
    # Megatron's checkpoints of a run that trains only a part of a model are not supported.
    has_moments = set(zero_partitions.MOMENTS) <= found.slots.keys()
    keeps_optimizer = options.optimizer and has_moments and not frozen
    slots = _slots(of_optimizer, weights, in_fp32=in_fp32) if keeps_optimizer else {}
    config, tensors = whole_model(family, config, HF, weights, str(step), slots)
    manifest = describe(tensors)
    with well_formed(str(step)):
        training = _training(found, parameters, family, config, takes_megatrons=asked)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        training=training,
        files=find_sidecars(directory),
        vocab_divisor=vocab_divisor(training.arguments),
        source=_kind(found),
        has_optimizer=bool(found.slots),
    )
    return OpenedSource(header, tensors)


def _slots(
    of_optimizer: Mapping[str, dict[str, LazyTensor]],
    weights: Mapping[str, LazyTensor],
    *,
    in_fp32: bool,
) -> dict[str, dict[str, LazyTensor]]:
    """The optimizer's tensors by slot. An fp32 weight is its own master, and has no second one."""
    slots = {slot: held for slot, held in of_optimizer.items() if slot != MASTER}
    if MASTER in of_optimizer and not in_fp32:
        masters = of_optimizer[MASTER].items()
        slots[MASTER] = {name: each for name, each in masters if weights[name].dtype != "float32"}
    return slots


def _description(path: Path, given: Path | None) -> Path:
    """The directory of the config.json: the given one, the checkpoint, or the directory above. Raises UsageError."""
    for directory in (given, path, path.parent):
        if directory is not None and (directory / CONFIG_NAME).is_file():
            return directory
    raise UsageError(
        f"{path}: a DeepSpeed checkpoint doesn't describe its model; give --config with the model's Hugging Face directory",
        code="config-needed",
    )


def _under_own_names(
    step: Path, directory: Path, model: tuple[Family, ModelConfig], options: LoadOptions
) -> OpenedSource:
    """Open the weights of a model that no family describes. directory: the place of its config.json."""
    found = zero_partitions.open_step(step)
    masters = _of_optimizer(found).get(MASTER, {})
    weights = _weights(found, masters, in_fp32=options.dtype == "float32")
    config, tensors = whole_model(*model, HF, weights, str(step))
    manifest = describe(tensors)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(directory),
        source=_kind(found),
        has_optimizer=bool(found.slots),
    )
    return OpenedSource(header, tensors)


def _kind(found: ZeroCheckpoint) -> str:
    universal = "universal, of " if found.universal else ""
    return f"deepspeed, {universal}ZeRO {_stage(found)} of {found.ranks} ranks"


def _stage(found: ZeroCheckpoint) -> str:
    return "1 or 2" if found.stage == 2 else str(found.stage)


def _of_optimizer(found: ZeroCheckpoint) -> dict[str, dict[str, LazyTensor]]:
    """The optimizer's tensors in fp32, by slot and name. Master weights are compared with the module's weights if it
    holds them."""
    slots: dict[str, dict[str, LazyTensor]] = {}
    for slot, held in found.slots.items():
        slots[slot] = {name: in_fp32(tensor, name) for name, tensor in held.items()}
    if found.stage < 3 and MASTER in slots:
        slots[MASTER] = {
            name: _checked(found, name, master) for name, master in slots[MASTER].items()
        }
    return slots


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
        if name in masters and (in_fp32 or tensor.dtype == "float32"):
            weights[name] = masters[name]
        elif name in masters and found.stage == 3:
            weights[name] = CastTensor(masters[name], tensor.dtype, name, overflow=False)
        elif name not in found.shared:
            weights[name] = tensor
    return weights | {
        name: weights[owner] for name, owner in found.shared.items() if owner in weights
    }


def _training(
    found: ZeroCheckpoint, parameters: Parameters, family: Family, config: ModelConfig, *, takes_megatrons: bool
) -> TrainingState:  # fmt: skip
    """The training state of a checkpoint. takes_megatrons: True if Megatron may decay other parameters than DeepSpeed
    did."""
    steps, samples = (
        int(found.state.get(name) or 0) for name in ("global_steps", "global_samples")
    )
    state = TrainingState(steps, consumed_train_samples=samples)
    if not found.slots:
        return state
    own = parameters.by_canonical(found.groups, found.group_of)
    shapes = canonical_shapes(family.rows, config)
    ds_config = found.state.get("ds_config")
    made = megatron_groups(own, shapes, ds_config, takes_megatrons=takes_megatrons)
    incomplete = None
    if found.further:
        incomplete = f"the optimizer's state has {', '.join(found.further)} besides the moments of Megatron's Adam"
    optimizer = OptimizerState(
        f"DeepSpeed ZeRO {_stage(found)}",
        found.step,
        made.groups,
        made.group_of,
        unsupported=made.unsupported or incomplete,
        torch=torch_groups(own, found.groups, ds_config),
        incomplete=incomplete,
    )
    state = replace(state, optimizer=optimizer, arguments={"optimizer": "adam"})
    return with_entry(with_samples(state, samples), found.state.get(ENTRY))


LOADER = Loader(
    name="deepspeed",
    description="DeepSpeed ZeRO 1 to 3: global_step* with *_model_states.pt and *_optim_states.pt; universal ones; "
    "layer files of pipelines",
    detect=detect,
    open=open,
    keeps_names=True,
    options=GROUP_OPTIONS,
    reads_files=False,
)
