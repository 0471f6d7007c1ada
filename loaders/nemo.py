"""NeMo 1: `.nemo` archives of Megatron core models, or the directory of an unpacked archive.

    model_config.yaml                                       --config describes the model, and must not contradict it
    model_weights.ckpt                                      one rank: a torch file of its parameters by name
    tp_rank_01_pp_rank_000/model_weights.ckpt               several ranks
    mp_rank_01/model_weights.ckpt                           several tensor-parallel ranks only
    model_weights/                                          a distributed checkpoint instead: not read inside an archive
    <hash>_tokenizer.model ...                              other files of the model

Names are Megatron core's names with the prefix `model.`. Layers count from 0 on each pipeline rank. Files are read in
place in the archive. Source: save_restore_connector.py and nlp_overrides.py of NeMo 1.23.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import rank_files, tar_archive, torch_zip
from formats.ceilings import YAML_BYTES
from formats.errors import CorruptCheckpoint
from formats.tensor import InputFile
from formats.yaml_file import parse_yaml, read_yaml
from megaconv.errors import UnknownFormat, UnsupportedInput, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.loader import Loader
from megaconv.megatron.arguments.nemo_settings import SETTINGS, require_agreement
from megaconv.megatron.arguments.size_tensors import CORE_SIZE_TENSORS
from megaconv.megatron.rank_files.source import RankSource, Spellings, open_model
from megaconv.megatron.states.names import describe_naming, naming_of
from megaconv.megatron.states.ranks import RankId, ranks_of_models
from megaconv.megatron.states.reward_head import has_reward_head, with_head_as_output
from megaconv.model.ir import OpenedSource
from megaconv.options import LoadOptions

_WEIGHTS = "model_weights.ckpt"
_DISTRIBUTED = "model_weights/"
_RANK = re.compile(
    rf"(?:tp_rank_(\d{{1,5}})_pp_rank_(\d{{1,5}})|mp_rank_(\d{{1,5}}))/{re.escape(_WEIGHTS)}"
)
_PREFIX = re.compile(r"^(?:model\.|module\.)+")
_LEGACY = "language_model."


def detect(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).is_file() for name in _ranks(_below(path)))
    return path.is_file() and path.suffix == ".nemo"


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open an archive or directory.

    Raises CheckpointError if it is damaged, leads outside itself, or holds an unsupported model.
    """
    if options.config is None:
        raise UsageError(
            f"{path}: the settings of NeMo 1 are not read; give --config with the Hugging Face directory of the model",
            code="config-needed",
        )
    states, settings = _contents(path)
    models = {rank: _parameters(state, where) for rank, (state, where) in states.items()}
    models = _with_reward_heads(models, path)
    files = dict.fromkeys(models, path)
    ranks = ranks_of_models(models, files, path)
    names = [name for chunks in ranks.weights.values() for chunk in chunks for name in chunk]
    if any(name.startswith(_LEGACY) for name in names):
        raise UnsupportedInput(
            f"{path}: has the names of NeMo's models before Megatron core ({_LEGACY}...), which are not supported; convert it with NeMo's "
            "scripts to a model with mcore_gpt, or to Hugging Face"
        )
    # With several stages, the last stage's copy of a tied embedding looks like an untied head.
    _, config = read_config(options.config / CONFIG_NAME)
    require_agreement(settings, config, f"{path}: {SETTINGS}")
    args = Namespace(untie_embeddings_and_output_weights=not config.tie_embeddings)
    source = RankSource(rank_files.RankFiles(path, None, {}), ranks, args)
    naming = naming_of(names)
    spellings = Spellings(CORE_SIZE_TENSORS, naming, f"nemo 1, {describe_naming(naming)}")
    return open_model(source, options, spellings)


def _with_reward_heads(
    models: Mapping[RankId, dict[str, Any]], path: Path
) -> dict[RankId, dict[str, Any]]:
    """The parameters of a reward model of NeMo-Aligner with its head as the output layer. Raises UnsupportedInput."""
    if any(rank.tp and has_reward_head(held) for rank, held in models.items()):
        raise UnsupportedInput(
            f"{path}: is a reward model on several tensor-parallel ranks, each with some columns of rm_head; save it with NeMo as a "
            "distributed checkpoint (dist_ckpt_format: torch_dist)"
        )
    return {rank: with_head_as_output(held, str(path)) for rank, held in models.items()}


def _below(path: Path) -> list[str]:
    return [_WEIGHTS, *(f"{child.name}/{_WEIGHTS}" for child in path.iterdir() if child.is_dir())]


def _ranks(names: list[str]) -> dict[str, RankId]:
    """File name -> rank, for the files that belong to a rank. `model_weights.ckpt` alone is rank 0."""
    found = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match:
            found[name] = RankId(int(match[1] or match[3]), int(match[2] or 0), 0)
    return found or {name: RankId(0, 0, 0) for name in names if name == _WEIGHTS}


_States = dict[RankId, tuple[Any, str]]
"""Rank -> (content of its file, the file's name in messages)."""


def _contents(path: Path) -> tuple[_States, Any]:
    """(the files of the ranks, the value of model_config.yaml, which is None without this file)."""
    if path.is_dir():
        ranks = _ranks([name for name in _below(path) if (path / name).is_file()])
        _require_one_each(ranks, path)
        states: _States = {}
        for name, rank in ranks.items():
            states[rank] = torch_zip.read(path / name), str(path / name)
        settings = path / SETTINGS
        return states, read_yaml(settings) if settings.is_file() else None
    file = InputFile.open(path)
    members = tar_archive.read_members(file)
    names = _without_root(list(members))
    ranks = _ranks(list(names))
    if not ranks:
        if any(name.startswith(_DISTRIBUTED) for name in names):
            raise UnsupportedInput(
                f"{path}: holds a distributed checkpoint; unpack it (tar xf), "
                f"and give the directory {_DISTRIBUTED} that comes out"
            )
        raise UnknownFormat(
            f"{path}: holds no {_WEIGHTS}, so that it is no archive of a NeMo model"
        )
    _require_one_each(ranks, path)
    states = {
        rank: (torch_zip.read_at(file, *members[names[name]]), f"{path}: {name}")
        for name, rank in ranks.items()
    }
    return states, _settings_in(file, members.get(names.get(SETTINGS, "")))


def _settings_in(file: InputFile, member: tar_archive.Member | None) -> Any:
    if member is None:
        return None
    where = f"{file.path}: {SETTINGS}"
    if member.size > YAML_BYTES:
        raise CorruptCheckpoint(f"{where}: has {member.size:,} bytes, more than any settings")
    return parse_yaml(file.read(member.offset, member.size), where)


def _require_one_each(ranks: Mapping[str, RankId], path: Path) -> None:
    if len(set(ranks.values())) != len(ranks):
        raise CorruptCheckpoint(f"{path}: holds two files of one rank")


def _without_root(members: list[str]) -> Mapping[str, str]:
    """Name without a common root directory -> name in the archive."""
    stripped = {name.partition("/")[2]: name for name in members if "/" in name}
    roots = {name.split("/")[0] for name in members}
    has_one_root = len(roots) == 1 and len(stripped) == len(members)
    if has_one_root and _ranks(list(stripped)) and not _ranks(members):
        return stripped
    return {name: name for name in members}


def _parameters(state: Any, where: str) -> dict[str, Any]:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CorruptCheckpoint(
            f"{where}: expected a dictionary of tensors, found {type(state).__name__}"
        )
    held = state.get("state_dict", state)
    if not isinstance(held, dict):
        raise CorruptCheckpoint(
            f"{where}: expected a dictionary of tensors, found {type(held).__name__}"
        )
    found: dict[str, Any] = {}
    for name, value in held.items():
        bare = _PREFIX.sub("", name)
        if bare in found:
            raise CorruptCheckpoint(f"{where}: has {bare} twice, under different prefixes")
        found[bare] = value
    return found


LOADER = Loader(
    name="nemo",
    description="NeMo 1 (.nemo, or unpacked) of Megatron core models; needs --config",
    detect=detect,
    open=open,
)
