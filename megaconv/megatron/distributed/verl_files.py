"""The distributed checkpoints of verl's Megatron runs: weights, optimizer and generators in directories of their own.

    actor/model/dist_ckpt/           the weights (with `use_dist_checkpointing`), without args
    actor/model/huggingface/         config.json and tokenizer, with the contents `hf_model`
    actor/optimizer/dist_ckpt/       the optimizer and the scheduler's state
    actor/extra/dist_ckpt/           random-number generators
    actor/transformer_config.json    the run's TransformerConfig, with its parallel layout
    actor/ckpt_contents.json         the step

Source: megatron_checkpoint_manager.py and megatron_utils.py of verl 0.9.1.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats import torch_dist
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_json
from megaconv.errors import UnknownFormat
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.megatron.arguments.provider import RENAMED
from megaconv.options import LoadOptions

VERL = "verl"
WEIGHTS = Path("model/dist_ckpt")
OPTIMIZER = Path("optimizer/dist_ckpt")
_HUGGINGFACE = Path("model/huggingface")
_CONTENTS = "ckpt_contents.json"
_TRANSFORMER_CONFIG = "transformer_config.json"
_MOST_BYTES = 1 << 22
_OF_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "transformer_impl",
    "moe_grouped_gemm",
)
"""The fields of a TransformerConfig that say which rank has which tensors."""


@dataclass(frozen=True)
class VerlRun:
    """The parts of a run's checkpoint beside its weights."""

    root: Path

    @property
    def optimizer(self) -> Path | None:
        """The directory of the optimizer; None without one."""
        directory = self.root / OPTIMIZER
        return directory if (directory / torch_dist.FORMAT_FILE).is_file() else None

    def args(self) -> Namespace:
        """The layout of the run as Megatron's arguments. Raises CorruptCheckpoint."""
        fields = _read(self.root / _TRANSFORMER_CONFIG)
        found = {RENAMED.get(name, name): fields[name] for name in _OF_LAYOUT if name in fields}
        return Namespace(**found)

    def state(self) -> dict[str, Any]:
        """The step of the run, as Megatron's iteration. Raises CorruptCheckpoint."""
        step = _read(self.root / _CONTENTS).get("global_step")
        return {"iteration": step} if type(step) is int else {}


def verl_weights(path: Path) -> Path | None:
    """The directory of the weights below that of an actor or a critic; None for anything else."""
    directory = path / WEIGHTS
    return directory if (directory / torch_dist.FORMAT_FILE).is_file() else None


def run_of(version: Path) -> VerlRun | None:
    """The run that saved these weights; None if it wasn't one of verl 0.9."""
    root = version.parent.parent
    is_of_verl = root / WEIGHTS == version and (root / _CONTENTS).is_file()
    return VerlRun(root) if is_of_verl else None


def with_config_beside(version: Path, options: LoadOptions) -> LoadOptions:
    """The options with the config.json that verl saved beside the weights."""
    run = run_of(version)
    if run is None or options.config is not None:
        return options
    directory = run.root / _HUGGINGFACE
    return replace(options, config=directory) if (directory / CONFIG_NAME).is_file() else options


def refuse_optimizer_alone(version: Path) -> None:
    """Raise UnknownFormat for the directory of an optimizer."""
    root = version.parent.parent
    if root / OPTIMIZER == version and (root / _CONTENTS).is_file():
        raise UnknownFormat(
            f"{version}: holds the optimizer of a verl run without its weights; give {root}, which has both if the run saved "
            f"{WEIGHTS} (use_dist_checkpointing)"
        )


def _read(file: Path) -> Mapping[str, Any]:
    """The settings in a JSON file; none if there is no such file. Raises CorruptCheckpoint."""
    found = read_json(file, _MOST_BYTES) if file.is_file() else {}
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{file}: should be settings by name, found {type(found).__name__}")
    return found
