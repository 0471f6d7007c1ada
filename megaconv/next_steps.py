"""The next step for an input that no loader recognises: one table row for each kind of input that people bring.

A row matches a directory or a file by its names and first bytes only. The first row that matches decides.
"""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from formats import rank_files
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.regular_files import open_regular
from megaconv.errors import CheckpointError, CorruptCheckpoint, UnknownFormat, UnsupportedInput
from megaconv.families.parts.keys import CONFIG_NAME, WEIGHT_NAMES

_MOST = 1000
"""The largest number of a directory's entries that are looked at."""
_LISTED = 5
"""The largest number of directories that a message names."""


class Kind(NamedTuple):
    """One row of the table."""

    patterns: tuple[str, ...]
    """Name patterns: a directory matches if it has one such entry, a file if its own name matches."""
    step: str
    """The message after the path. {name} is the entry that matched, {path} the path."""
    incomplete: bool = False
    """True for a readable checkpoint that lacks one file. Such a row doesn't match a directory with a config.json."""


DIRECTORIES = (
    Kind(
        ("sparse.json",),
        "is a sparse update for an engine ({name}), which holds only the changed elements; for a patch that megaconv reads, run "
        "`megaconv delta OLD NEW --save-dir PATCH` without --sparse",
    ),
    Kind(
        ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
        "is an adapter (PEFT), not a whole model; merge it into its base: `megaconv merge BASE {path} --save-dir OUT` (--loader peft "
        "translates it for Megatron-Bridge)",
    ),
    Kind(
        ("iter_*/adapter_config.json",),
        "is a run that trains an adapter (PEFT), which holds only what is added to a model: `megaconv merge BASE RUN --save-dir OUT` "
        "merges the newest into its base, `megatron-lite chat --load BASE --adapter RUN` computes it beside the base",
    ),
    Kind(
        ("rank0.safetensors",),
        "has a rank file of TensorRT-LLM ({name}) and no config.json, which describes the model; copy the original's into the same "
        "directory",
        incomplete=True,
    ),
    Kind(
        ("*.gguf",),
        "holds a GGUF file ({name}): give that file, and --config with the Hugging Face directory of the model",
    ),
    Kind(
        ("*.nemo",),
        "holds a NeMo 1 archive ({name}): give that file, and --config with the Hugging Face directory of the model",
    ),
    Kind(
        ("zero_to_fp32.py", "global_step*", "zero_pp_rank_*", "*_optim_states.pt"),
        "has the files of a DeepSpeed run ({name}), but no complete checkpoint of ZeRO: expected `latest` with the directory that it "
        "names, or *_model_states.pt with *_optim_states.pt",
    ),
    Kind(
        ("model_weights/metadata.json",),
        "is a NeMo 1 checkpoint, whose tensors alone can be read: give its model_weights/, and --config with the Hugging Face "
        "directory of the model",
    ),
    Kind(
        ("model_weights",),
        "is a NeMo 1 checkpoint ({name}), which can't be read; export it to a Hugging Face directory with NeMo",
    ),
    Kind(
        ("context/model.yaml", "context/io.json"),
        "has {name} of NeMo 2 and no weights/.metadata, which locates its tensors; copy the whole checkpoint, hidden files "
        "included",
        incomplete=True,
    ),
    Kind(
        ("run_config.yaml",),
        "has {name} of Megatron-Bridge and no .metadata, which locates its tensors; copy the whole checkpoint, hidden files "
        "included",
        incomplete=True,
    ),
    Kind(
        ("consolidated.*",),
        "has {name} and no params.json, which describes the model; copy the original's into the same directory",
        incomplete=True,
    ),
    Kind(
        WEIGHT_NAMES,
        "has weights ({name}) and no config.json, which describes the model; copy the original model's there, or give --config ORIGINAL",
        incomplete=True,
    ),
)
REMAINS = (
    Kind(
        ("*.safetensors", "pytorch_model*.bin"),
        "has weights ({name}) and neither a config.json nor an index (model.safetensors.index.json); put the original's beside them",
        incomplete=True,
    ),
    Kind(
        ("flax_model.msgpack", "tf_model.h5", "model.ckpt.index", "*.onnx", "*.h5"),
        "holds {name}, which can't be read; load it with transformers and save it with save_pretrained()",
    ),
    Kind(
        ("*.distcp",),
        "has {name} but no .metadata, which locates every tensor; copy the whole checkpoint, hidden files included",
        incomplete=True,
    ),
)
"""Used only if there is no checkpoint in a subdirectory."""
FILES = (
    Kind(("*.gguf",), "is called a GGUF file and doesn't begin as one; copy it again"),
    Kind(
        ("*.tar", "*.tar.gz", "*.tgz", "*.zip", "*.tar.zst", "*.7z"),
        "is an archive; unpack it and give the directory that comes out",
    ),
)


def explain(path: Path, is_checkpoint: Callable[[Path], bool]) -> CheckpointError | None:
    """The error for an input that no loader recognises; None if no row of the table matches.

    is_checkpoint: tells whether some loader recognises a directory.
    """
    try:
        return _directory(path, is_checkpoint) if path.is_dir() else _file(path, is_checkpoint)
    except OSError:  # no permission to look further
        return None


def refuse_mistaken(path: Path) -> None:
    """Raises CorruptCheckpoint if a file is a web page or a pointer file instead of what its name says."""
    instead = mistaken(_start(path))
    if instead:
        raise CorruptCheckpoint(f"{path}: {instead}")


def has_bare_weights(path: Path) -> bool:
    """True if a directory has a model's weights but no config.json that says which model they are."""
    names = [
        name
        for name in (*WEIGHT_NAMES, CONFIG_NAME, "adapter_config.json", "params.json")
        if (path / name).is_file()
    ]
    return bool(names) and set(names) <= set(WEIGHT_NAMES)


def _file(path: Path, is_checkpoint: Callable[[Path], bool]) -> CheckpointError | None:
    for kind in FILES:
        if any(path.match(pattern) for pattern in kind.patterns):
            return UnsupportedInput(f"{path}: {kind.step}")
    directory = next(
        (each for each in list(path.absolute().parents)[:3] if is_checkpoint(each)), None
    )
    if directory is not None:
        return UnknownFormat(
            f"{path}: is one file of a checkpoint; give the directory that holds all of it: {directory}"
        )
    known = _directory(path.parent, is_checkpoint, below=False)
    if known is not None:
        of_directory = f"{path.parent}: "
        said = str(known)
        if not said.startswith(of_directory):  # it is about another file
            return known
        return type(known)(f"{path}: is a file; its directory {said.removeprefix(of_directory)}")
    step = (
        "; a configuration of any name is taken by --loader config"
        if path.suffix == ".json"
        else ""
    )
    return UnknownFormat(f"{path}: is a file, where the directory of a checkpoint should be{step}")


def _directory(
    path: Path, is_checkpoint: Callable[[Path], bool], *, below: bool = True
) -> CheckpointError | None:
    if next(path.iterdir(), None) is None:
        return UnknownFormat(
            f"{path}: is an empty directory; is this the right path, and is a download or a copy complete?"
        )
    version = rank_files.find_version(path)
    if version is not None and next(version.iterdir(), None) is None:
        return UnknownFormat(
            f"{version}: is an empty directory, which {path / rank_files.TRACKER} names; is the copy complete?"
        )
    if path.name.startswith("mp_rank_") or (path / rank_files.MODEL_FILE).is_file():
        parent = path.absolute().parent
        root = parent
        for each in (parent, parent.parent):
            if is_checkpoint(each):
                root = each
                break
        return UnknownFormat(
            f"{path}: is one rank of a Megatron checkpoint; give the directory of all ranks: {root}"
        )
    error = _of(DIRECTORIES, path)
    if error is None and below:
        checkpoints = list(islice(_below(path, is_checkpoint), _LISTED + 1))
        error = _parent(path, checkpoints)
    return error or _of(REMAINS, path)


def _of(kinds: tuple[Kind, ...], path: Path) -> CheckpointError | None:
    for kind in kinds:
        found = next(
            (found for pattern in kind.patterns for found in islice(path.glob(pattern), 1)), None
        )
        if found is None:
            continue
        what = f"{path}: {kind.step.format(name=found.relative_to(path), path=path)}"
        if not kind.incomplete:
            return UnsupportedInput(what)
        if not (path / CONFIG_NAME).is_file():
            return UnknownFormat(what)
    return None


def _parent(path: Path, below: list[Path]) -> CheckpointError | None:
    if len(below) == 1:
        name = below[0].relative_to(path)
        return UnknownFormat(
            f"{path}: is no checkpoint itself; `{name}/` below is one: give {below[0]}"
        )
    if below:
        names = ", ".join(f"`{each.relative_to(path)}/`" for each in below[:_LISTED])
        if len(below) > _LISTED:
            names += " and more"
        return UnknownFormat(
            f"{path}: is no checkpoint itself; these below are, give one of them: {names}"
        )
    return None


def _below(path: Path, is_checkpoint: Callable[[Path], bool]) -> Iterator[Path]:
    """Checkpoints one or two levels down. The checkpoints inside a checkpoint are not listed."""
    for child in _directories(path):
        if is_checkpoint(child):
            yield child
        else:
            yield from filter(is_checkpoint, _directories(child))


def _directories(path: Path) -> Iterator[Path]:
    """The directories in a directory, without links. Only the first entries of a huge directory are read."""
    for child in sorted(islice(path.iterdir(), _MOST)):
        if child.is_dir() and not child.is_symlink():
            yield child


def _start(path: Path) -> bytes:
    descriptor = open_regular(path)
    try:
        return os.read(descriptor, SEEN_BYTES)
    finally:
        os.close(descriptor)
