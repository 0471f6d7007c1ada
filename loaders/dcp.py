"""Plain distributed checkpoints of PyTorch (DCP): from torchtitan, FSDP2, DTensors, or anything that calls dcp.save.

    .metadata, __0_0.distcp ...                            either serialization format
    shard-00001-model-00001-of-00001.safetensors ...       HuggingFaceStorageWriter(save_distributed=True)

Tensors have transformers' names, or torchtitan's (megaconv/pytorch/titan_rows.py). torchtitan's Llama has Meta's names,
and stores each head's rows of q and k as rotary pairs. The names may have a prefix from the state dict. The config.json
comes from --config, from the checkpoint's directory, or from the `.hf_metadata` in which NeMo AutoModel stores it.
Optimizer state is read if it is that of torch's Adam (megaconv/pytorch/stored_optimizer.py).
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from formats import sharded_safetensors, torch_dist
from formats.chunked import ChunkedTensor
from formats.wording import listing
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import TensorMismatch, UsageError
from megaconv.families import Family, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.huggingface.canonical import whole_model
from megaconv.huggingface.stored_names import renamed, unwrapped
from megaconv.loader import Loader
from megaconv.megatron.arguments.run_arguments import vocab_divisor
from megaconv.megatron.arguments.zero_groups import GROUP_OPTIONS, takes_megatrons
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF, HF_SEPARATE, HF_STACKED, META_ROWS, TITAN, Naming
from megaconv.model.natives import unsharded_tensors
from megaconv.model.table import Row, canonical_shapes, expressible
from megaconv.model.training import TrainingState
from megaconv.options import LoadOptions
from megaconv.pytorch import titan_biases, titan_names
from megaconv.pytorch.dcp_training import open_run
from megaconv.pytorch.progress import COUNT_OPTIONS
from megaconv.pytorch.titan_rows import with_titan_names
from megaconv.pytorch.training_state import Parameters

_log = logging.getLogger("megaconv")

HF_METADATA = ".hf_metadata"
_TITANS = (META_ROWS, TITAN)
_TRANSFORMERS = (HF, HF_STACKED)
_MODEL = "model."
"""The end of the prefix that a state dict with further entries gives to the names of the model."""
_OPTIMIZER = re.compile(r"(.*\.)?optim(izers?)?\.")
_NOT_MODEL = re.compile(
    r"(optim|optimizer|optimizers|lr_scheduler|scheduler|dataloader|train_state)\."
)


def detect(path: Path) -> bool:
    return _is_plain(path) or (
        not (path / CONFIG_NAME).is_file() and sharded_safetensors.is_sharded(path)
    )


def _is_plain(path: Path) -> bool:
    return torch_dist.is_dcp(path) and not (path / torch_dist.FORMAT_FILE).is_file()


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a checkpoint. Raises CheckpointError if it is incomplete, or doesn't match the configuration."""
    directory = options.config or _description(path)
    if not (directory / CONFIG_NAME).is_file():
        raise UsageError(
            f"{path}: a distributed checkpoint doesn't describe its model; give --config with the model's Hugging Face directory",
            code="config-needed",
        )
    family, config = read_config(directory / CONFIG_NAME, own_names=options.own_names)
    family = with_titan_names(family)
    if options.true_vocab_size not in (None, config.vocab):
        raise UsageError(
            f"{path}: its vocabulary of {config.vocab} has no padding; leave --true-vocab-size out"
        )
    archives = torch_dist.open_directory(path) if torch_dist.is_dcp(path) else None
    opened = sharded_safetensors.read(path) if archives is None else archives.tensors()
    if archives is None and config.own_names:
        _log.warning(
            "%s: has files of %d ranks, and nothing says whether that is all of them: no family is known whose shapes would show it",
            path,
            sharded_safetensors.require_files(path),
        )
    bare = {name: unwrapped(name) for name in opened if not _NOT_MODEL.match(name)}
    plain = renamed(opened, bare, str(path))
    earlier = _earlier_names(family)
    stored = renamed(plain, {name: earlier(name, plain.keys()) for name in plain}, str(path))
    naming, prefix = (HF, "") if config.own_names else _spelling(path, family, config, stored)
    of_model = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
    found = {name.removeprefix(prefix): tensor for name, tensor in of_model.items()}
    if naming == TITAN and not config.experts.router_bias:
        found = titan_biases.left_out(found, path, options.extra)
    takes = takes_megatrons(options.extra)
    run = None
    if archives is not None and options.optimizer and not config.own_names:
        parameters = Parameters.of(
            family, config, (naming,) if naming in _TITANS else _TRANSFORMERS
        )
        with well_formed(str(path)):
            name_of = _Names(found, plain, prefix, earlier).of_parameter
            run = open_run(archives, found, parameters, name_of, config.sizes()["kv_heads"])
    slots = {} if run is None else run.slots
    config, tensors = whole_model(family, config, naming, found, str(path), slots)
    manifest = describe(tensors)
    training = TrainingState()
    if run is not None:
        shapes = canonical_shapes(family.rows, config)
        with well_formed(str(path)):
            training = run.training(shapes, options.extra, takes_megatrons=takes)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        training=training,
        files=find_sidecars(directory),
        vocab_divisor=vocab_divisor(training.arguments),
        source=f"dcp, {'torchtitan' if naming in _TITANS else 'transformers'} names",
        has_optimizer=any(_OPTIMIZER.match(name) for name in opened),
    )
    return OpenedSource(header, tensors)


def _description(path: Path) -> Path:
    """The directory with the config.json and the tokenizer of a checkpoint. It may hold neither."""
    beside = path / HF_METADATA
    return beside if (beside / CONFIG_NAME).is_file() else path


def _earlier_names(family: Family) -> Callable[[str, Collection[str]], str]:
    """The function that gives a tensor its name in this loader's tables: torchtitan's Llama is known by earlier names."""
    has_own = any(row.spelling(TITAN) for row in family.rows)
    return (lambda name, names: name) if has_own else titan_names.before_03


class _Names(NamedTuple):
    """The names of a model's tensors in a checkpoint."""

    found: Collection[str]
    """As this loader reads them."""
    stored: Collection[str]
    """As stored, without wrappers."""
    prefix: str
    """The common prefix of the stored names."""
    earlier: Callable[[str, Collection[str]], str]

    def of_parameter(self, name: str) -> str:
        """The name of a parameter of the optimizer, whose names may lack the prefix."""
        plain = self.earlier(unwrapped(name), self.stored)
        shorter = plain.removeprefix(self.prefix)
        return plain if plain in self.found else self.earlier(shorter, self.found)


def _spelling(
    path: Path, family: Family, config: ModelConfig, stored: Mapping[str, ChunkedTensor]
) -> tuple[Naming, str]:
    """(naming scheme, prefix of all names), found by the name of the embedding. Raises TensorMismatch if there is none.

    HF stands for all of transformers' schemes, which whole_model() tells apart.
    """
    namings = [*_TRANSFORMERS, HF_SEPARATE]
    namings += [each for each in _TITANS if expressible(family.rows, each, family.features)]
    wanted: dict[str, Naming] = {}
    for naming in namings:
        wanted.setdefault(_embedding(family.rows, naming), naming)
    found: list[tuple[Naming, list[str]]] = []
    for embedding, naming in wanted.items():
        complete = re.compile(rf"(^|\.){re.escape(embedding)}$")
        prefixes = [name.removesuffix(embedding) for name in stored if complete.search(name)]
        if prefixes:
            found.append((naming, prefixes))
    if not found:
        embeddings = " or ".join(wanted)
        raise TensorMismatch(
            f"{path}: has no {embeddings}, by which a {family.name} is recognised; "
            f"it has {listing(stored)}",
            code="missing-tensor",
        )
    naming, prefixes = found[0]
    if len(found) > 1:
        # One scheme's name may be a prefix and another scheme's name.
        naming, prefixes = max(found, key=lambda each: _known(family, config, each, stored))
    return HF if naming not in _TITANS else naming, _prefix_of_model(path, prefixes)


def _known(
    family: Family,
    config: ModelConfig,
    candidate: tuple[Naming, list[str]],
    stored: Collection[str],
) -> int:
    """The number of the model's tensors that are stored under a scheme's names with one of its prefixes."""
    naming, prefixes = candidate
    names = [native.name for native in unsharded_tensors(family.rows, config, naming)]
    return max(sum(prefix + name in stored for name in names) for prefix in prefixes)


def _prefix_of_model(path: Path, prefixes: Collection[str]) -> str:
    """The prefix of the names of the model. A warning names those of other models, such as an average of its weights."""
    chosen = min(
        prefixes, key=lambda prefix: (bool(prefix) and not prefix.endswith(_MODEL), len(prefix))
    )
    if len(prefixes) > 1:
        others = [prefix for prefix in prefixes if prefix != chosen]
        _log.warning(
            "%s: holds several models: %s is read, %s left out",
            path,
            f"{chosen}*",
            listing([f"{prefix}*" for prefix in others]),
        )
    return chosen


def _embedding(rows: tuple[Row, ...], naming: Naming) -> str:
    (spelling,) = next(row for row in rows if row.stage == "first").spelling(naming)
    return spelling.name


LOADER = Loader(
    name="dcp",
    description="PyTorch distributed checkpoints (DCP) with transformers' or torchtitan's names; needs --config",
    detect=detect,
    open=open,
    keeps_names=True,
    options={
        **GROUP_OPTIONS,
        **titan_biases.OPTIONS,
        **COUNT_OPTIONS,
    },
    reads_files=False,
)
