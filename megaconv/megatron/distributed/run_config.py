"""The files that Megatron-Bridge and NeMo 2 store beside a distributed checkpoint instead of Megatron's `args`.

    <root>/latest_train_state.pt                Megatron-Bridge: which iteration is the last, as latest_checkpointed_iteration.txt
    <root>/iter_0000010/run_config.yaml         `model:` a provider's fields; `tokenizer:`, `optimizer:`, `scheduler:`, `ddp:` ...
    <root>/iter_0000010/train_state.pt          step and consumed samples, a tensor each
    <root>/iter_0000010/tokenizer/              newer ones
    <root>/iter_0000010/.metadata, *.distcp     Megatron core's torch_dist

    <root>/weights/.metadata, *.distcp          NeMo 2: torch_dist, `module.` before every key
    <root>/context/model.yaml                   `config:` the model's fields, `tokenizer:`
    <root>/context/nemo_tokenizer/              newer ones
    <root>/context/io.json                      a graph of objects with their classes: never read

Source: checkpointing.py, state.py and yaml_utils.py of Megatron-Bridge; nemo/lightning/io of NeMo 2.
"""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from formats import rank_files, torch_dist, torch_zip
from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import np
from formats.tensor import FileTensor, StridedTensor, read_tensor
from formats.yaml_file import read_yaml
from megaconv.megatron.arguments.provider import provider_arguments
from megaconv.megatron.arguments.run_arguments import OPTIMIZATION
from megaconv.model.ceilings import OPERATIONS

BRIDGE, NEMO = "Megatron-Bridge", "NeMo 2"
RUN_CONFIG = "run_config.yaml"
NEMO_WEIGHTS = "weights"
NEMO_MODEL = "context/model.yaml"
TRAIN_STATE = "train_state.pt"
LATEST = "latest_train_state.pt"
_NUMBERS = ("int32", "int64", "float32", "float64")
_MOST_COUNTED = 1 << 62
"""The largest number of samples or steps."""
_OPERATIONS = "floating_point_operations_so_far"


class Described(NamedTuple):
    """A checkpoint's settings, which replace Megatron's args."""

    args: Namespace
    state: Mapping[str, Any]
    """The entries that Megatron would store beside args: the iteration, the number of operations so far."""
    writer: str
    """The software that wrote it, for messages; empty if it isn't known."""


def nemo_weights(path: Path) -> Path | None:
    """The distributed checkpoint in a NeMo 2 directory; None for any other directory."""
    weights, context = path / NEMO_WEIGHTS, (path / NEMO_MODEL).parent
    found = (weights / torch_dist.FORMAT_FILE).is_file() or (
        torch_dist.is_dcp(weights) and context.is_dir()
    )
    return weights if found else None


def latest_version(path: Path) -> Path | None:
    """The last iteration according to Megatron-Bridge's own tracker; None without one. Raises CorruptCheckpoint."""
    tracker = path / LATEST
    if not tracker.is_file():
        return None
    version = path / rank_files.iteration_directory(_counts(tracker).get("step", 0))
    if not version.is_dir():
        raise CorruptCheckpoint(
            f"{tracker}: names {version.name}, but its directory holds no {version.name}",
            code="missing-file",
        )
    return version


def describe(version: Path, *, complete: bool) -> Described:
    """The settings of a checkpoint without args. complete: True if nothing else describes the model.

    Raises CorruptCheckpoint for settings that are missing or damaged, UnknownFamily for settings that aren't supported.
    """
    run_config = version / RUN_CONFIG
    model = version.parent / NEMO_MODEL
    is_nemo = version.name == NEMO_WEIGHTS
    if run_config.is_file():
        return _of_bridge(run_config, complete=complete)
    if is_nemo and model.is_file():
        return _of_nemo(model, complete=complete)
    if complete:
        raise CorruptCheckpoint(
            f"{version}: has no args; Megatron writes them into {torch_dist.COMMON_FILE}, Megatron-Bridge {RUN_CONFIG}, NeMo "
            f"{NEMO_MODEL}. Without them give --config with the Hugging Face directory of the model"
        )
    return Described(Namespace(), {}, NEMO if is_nemo else "")


def _of_bridge(path: Path, *, complete: bool) -> Described:
    settings = _mapping(read_yaml(path), str(path))
    fields = _mapping(settings.get("model"), f"{path}: model")
    args = provider_arguments(fields, f"{path}: model", complete=complete)
    sections = {name: value for name, value in settings.items() if isinstance(value, dict)}
    for section in ("optimizer", "scheduler", "train", "rng"):
        for name, value in sections.get(section, {}).items():
            if name in OPTIMIZATION and isinstance(value, (int, float, str)):
                setattr(args, name, value)
    ddp = sections.get("ddp", {})
    args.overlap_grad_reduce = ddp.get("overlap_grad_reduce") is True
    if type(ddp.get("bucket_size")) is int:
        args.ddp_bucket_size = ddp["bucket_size"]
    names = ("tokenizer_model", "vocab_file", "merge_file")
    _set_tokenizer(
        args,
        path.parent / "tokenizer",
        {name: sections.get("tokenizer", {}).get(name) for name in names},
    )
    counts = _counts(path.with_name(TRAIN_STATE)) if path.with_name(TRAIN_STATE).is_file() else {}
    args.consumed_train_samples = counts.get("consumed_train_samples", 0)
    args.consumed_valid_samples = counts.get("consumed_valid_samples", 0)
    operations = counts.get(_OPERATIONS, 0)
    state = {"num_floating_point_operations_so_far": operations}
    return Described(
        args, state | ({"iteration": counts["step"]} if "step" in counts else {}), BRIDGE
    )


def _of_nemo(path: Path, *, complete: bool) -> Described:
    settings = _mapping(read_yaml(path), str(path))
    args = provider_arguments(
        _mapping(settings.get("config"), f"{path}: config"), f"{path}: config", complete=complete
    )
    tokenizer = settings.get("tokenizer")
    given = tokenizer if isinstance(tokenizer, dict) else {}
    named = given.get("pretrained_model_name") or given.get("model_path")
    _set_tokenizer(args, path.with_name("nemo_tokenizer"), {"tokenizer_model": named})
    return Described(args, {}, NEMO)


def _set_tokenizer(args: Namespace, directory: Path, named: Mapping[str, Any]) -> None:
    """Set the tokenizer's arguments.

    directory: the tokenizer beside the checkpoint, which takes precedence over a named one.
    """
    if directory.is_dir():
        args.tokenizer_model = str(directory)
        return
    for name, value in named.items():
        if isinstance(value, str):
            setattr(args, name, value)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CorruptCheckpoint(
            f"{where}: should be settings by name, found {type(value).__name__}"
        )
    return value


def _counts(path: Path) -> dict[str, Any]:
    """The numbers of a train_state.pt by name: integers, and a float that may exceed them. Raises CorruptCheckpoint."""
    stored = torch_zip.read(path)
    if not isinstance(stored, dict):
        raise CorruptCheckpoint(f"{path}: should hold a dictionary, found {type(stored).__name__}")
    found = {}
    for name, stored_value in stored.items():
        value = _number(stored_value)
        if type(value) not in (int, float) or not isinstance(name, str):
            continue
        most = OPERATIONS if name == _OPERATIONS else _MOST_COUNTED
        if not 0 <= value <= most:
            raise CorruptCheckpoint(
                f"{path}: its {name} should be from 0 to {most:,}, found {value}"
            )
        found[name] = value if name == _OPERATIONS else int(value)
    return found


def _number(value: Any) -> Any:
    """A tensor that holds one number as this number; any other value unchanged."""
    is_tensor = isinstance(value, (FileTensor, StridedTensor))
    if is_tensor and value.shape == () and value.dtype in _NUMBERS:
        return read_tensor(value).view(np.dtype(value.dtype)).reshape(-1)[0].item()
    return value
