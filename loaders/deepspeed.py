"""DeepSpeed's ZeRO checkpoints, stages 0 to 3: weights, and the optimizer's state.

Weights come as the module computes with them; under stage 3, which stores none such, they are the optimizer's fp32 ones rounded. With
--dtype fp32 they are those fp32 ones. Parameters that are not trained lie in the module alone. Names are transformers';
config.json lies beside (as the Trainer puts it), or comes from --config.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats import zero_partitions
from formats.tensor import LazyTensor
from formats.zero_partitions import ZeroCheckpoint
from megaconv.engine.cast import CastTensor
from megaconv.engine.sidecars import find_sidecars
from megaconv.engine.weight_files import has_weights, whole_model
from megaconv.errors import NotExpressible, UnknownFormat, UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.arguments.param_groups import WITHOUT, class_of, read_group
from megaconv.megatron.optimizer.master_check import CheckedMaster
from megaconv.megatron.rank_files.layer_files import holds_layer_files, open_layer_files
from megaconv.model.check import listing, well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, OpenedSource, describe, main_dtype
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF, HF_STACKED
from megaconv.model.natives import native_tensors
from megaconv.model.table import canonical_shapes
from megaconv.model.training import MASTER, OptimizerState, ParamGroup, TrainingState
from megaconv.options import LoadOptions

DESCRIPTION = "DeepSpeed ZeRO 1 to 3: global_step* with *_model_states.pt and *_optim_states.pt; universal ones; layer files of pipelines"

_log = logging.getLogger("megaconv")


def detect(path: Path) -> bool:
    return path.is_dir() and not has_weights(path) and zero_partitions.find_step(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a checkpoint that is incomplete, or not of the model that the configuration describes."""
    step = zero_partitions.find_step(path)
    if step is None:
        raise UnknownFormat(f"{path}: has no global_step* directory of DeepSpeed's that `latest` names, and is none")
    if holds_layer_files(step):
        return open_layer_files(step, options)
    directory = next(
        (each for each in (options.config, path, path.parent) if each and (each / CONFIG_NAME).is_file()), None
    )
    if directory is None:
        raise UsageError(
            f"{path}: a DeepSpeed checkpoint doesn't say what model it is; give --config with its Hugging Face directory",
            code="config-needed",
        )
    family, config = read_config(directory / CONFIG_NAME)
    found = zero_partitions.open_step(step)
    in_fp32 = options.dtype == "float32" or found.dtype == "float32"
    weights = _weights(found, in_fp32=in_fp32)
    frozen = [name for name in weights if name not in found.group_of and name not in found.shared]
    if found.slots and frozen:
        _log.warning("%s: %s: not trained, as the module has them", step, listing(frozen))
    # Megatron's checkpoints of a run that trains a part of a model are not supported.
    wanted = options.optimizer and not frozen and set(zero_partitions.MOMENTS) <= found.slots.keys()
    slots = {slot: held for slot, held in found.slots.items() if wanted and not (in_fp32 and slot == MASTER)}
    config, tensors = whole_model(family, config, HF, weights, str(step), slots)
    if found.stage < 3:  # under stage 3 nothing else is stored that masters could be compared with
        tensors = {
            key: CheckedMaster(key.name, tensor, tensors[Key(key.name)]) if key.slot == MASTER else tensor
            for key, tensor in tensors.items()
        }
    manifest = describe(tensors)
    with well_formed(str(step)):
        training = _training(found, family, config)
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


def _weights(found: ZeroCheckpoint, *, in_fp32: bool) -> dict[str, LazyTensor]:
    """By name, second names of shared tensors included."""
    masters = found.slots.get(MASTER, {})
    weights: dict[str, LazyTensor] = {}
    for name, tensor in found.module.items():
        if name in masters and (in_fp32 or found.stage == 3):
            master = masters[name]
            weights[name] = master if in_fp32 else CastTensor(master, tensor.dtype, name, overflow=False)
        elif name not in found.shared:
            weights[name] = tensor
    return weights | {name: weights[owner] for name, owner in found.shared.items() if owner in weights}


def _training(found: ZeroCheckpoint, family: Family, config: ModelConfig) -> TrainingState:
    """Its groups are those of a Megatron run, which decays matrices and no vectors, with DeepSpeed's numbers."""
    steps, samples = (int(found.state.get(name) or 0) for name in ("global_steps", "global_samples"))
    state = TrainingState(steps, consumed_train_samples=samples)
    if not found.slots:
        return state
    own = _groups_by_name(found, family, config)
    made: dict[bool, ParamGroup] = {}
    for name, shape in canonical_shapes(family.rows, config).items():
        if name in own:
            decays = class_of(name, shape, decoupled=False).decay
            settings = {**read_group(own[name], found.groups).settings, "weight_decay": _decay(found, decays=decays)}
            group = ParamGroup(float(decays), settings=settings)
            if made.setdefault(decays, group) != group:
                raise NotExpressible(
                    f"{found.directory}: the optimizer has groups that Megatron's doesn't have; {WITHOUT}"
                )
    order = list(made)
    shapes = canonical_shapes(family.rows, config)
    group_of = {
        name: order.index(class_of(name, shapes[name], decoupled=False).decay) for name in own if name in shapes
    }
    optimizer = OptimizerState(f"DeepSpeed ZeRO {_stage(found)}", found.step, tuple(made.values()), group_of)
    scheduler = {**dict.fromkeys(_SCHEDULE), "num_steps": samples}
    return replace(state, optimizer=optimizer, scheduler=scheduler, arguments={"optimizer": "adam"})


_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
"""What Megatron's scheduler keeps of a schedule, and DeepSpeed doesn't: a run overrides it, or ends at once, since None is no
setting of its own."""


def _decay(found: ZeroCheckpoint, *, decays: bool) -> float:
    return max(float(group.get("weight_decay", 0.0)) for group in found.groups) if decays else 0.0


def _groups_by_name(found: ZeroCheckpoint, family: Family, config: ModelConfig) -> dict[str, Mapping[str, Any]]:
    """The optimizer's group of each canonical tensor that is trained."""
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    return {
        name: found.groups[found.group_of[native.name]]
        for naming in (HF, HF_STACKED)
        for native in native_tensors(family.rows, config, naming, Layout(), 0, whole, config.vocab)
        for name in native.parts
        if native.name in found.group_of
    }
