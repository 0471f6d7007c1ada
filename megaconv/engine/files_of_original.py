"""--base: the original's config.json and small files, where the model's own special tokens and tokenizer come first.

A conversion with --tokenizer names other special tokens. The original's config.json and the further files of its tokenizer
would bring the old ones back.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.small_files import SmallFile
from formats.wording import listing
from megaconv.engine.base_model import BaseModel
from megaconv.engine.new_tokenizer import tokenizer_files
from megaconv.engine.sidecars import is_of_tokenizer
from megaconv.engine.special_tokens import SPECIAL_IDS, listed
from megaconv.engine.token_lists import kinds_of, token_list
from megaconv.errors import CorruptCheckpoint
from megaconv.families import read_config
from megaconv.families.parts.hf_config import load_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.scores import class_around
from megaconv.families.parts.whole_model import whole_config_json, with_values
from megaconv.model.beside import Whole
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header

_Named = Mapping[str, tuple[Any, Any]]
"""Key of config.json, such as `eos_token_id` -> the numbers of tokens (in the original, in the model)."""


@dataclass(frozen=True)
class FilesOfOriginal:
    """The files that an output gets from the original."""

    config_json: bytes
    """The original's, with the dtype of the model, with special tokens that only the model names, and with its class if it
    gives scores."""
    copied: Mapping[str, Path]
    notices: tuple[str, ...]
    """Lines for people: what the output doesn't have of the original."""


def files_of_original(
    base: BaseModel, header: Header, config: ModelConfig, held: Collection[str]
) -> FilesOfOriginal:
    """The files of the original. config: the model as it is written. held: files that the output has already."""
    further = {name: path for name, path in base.files().items() if name not in held}
    left_out = _of_another_tokenizer(base, header, further)
    named = _named_otherwise(base, config)
    original = load_config(base.directory / CONFIG_NAME)
    if config.has("scores"):
        original |= class_around(original, config)
    return FilesOfOriginal(
        whole_config_json(with_values(Whole(original), named).config, config.dtype),
        {name: path for name, path in further.items() if name not in left_out},
        tuple(_notices(base, named, left_out)),
    )


def _named_otherwise(base: BaseModel, config: ModelConfig) -> _Named:
    """The special tokens for which a model names a token that the original doesn't name.

    Empty if the model has no config.json of its own: another format may know only one of several tokens that end a text.
    """
    if config.hf is None:
        return {}
    _, original = read_config(base.directory / CONFIG_NAME, whole=True, own_names=True)
    if original.own_names is not None:
        return {}
    pairs = {name: (getattr(original, name), getattr(config, name)) for name in SPECIAL_IDS}
    return {
        name: (before, now)
        for name, (before, now) in pairs.items()
        if not set(listed(now)) <= set(listed(before))
    }


def _of_another_tokenizer(base: BaseModel, header: Header, further: Collection[str]) -> list[str]:
    """Those of the further files that belong to the original's tokenizer, if the model's tokenizer has other tokens."""
    of_tokenizer = [name for name in further if is_of_tokenizer(name)]
    return of_tokenizer if of_tokenizer and not _have_same_tokens(base, header) else []


def _have_same_tokens(base: BaseModel, header: Header) -> bool:
    """True if two tokenizers have the same tokens, or if they can't be compared."""
    ours = tokenizer_files(header)
    theirs = {
        name: SmallFile.of(name, path)
        for name, path in base.files().items()
        if is_of_tokenizer(name)
    }
    both = [kind for kind in kinds_of(ours) if kind in theirs]
    try:
        return not both or token_list(ours, both[0]) == token_list(theirs, both[0])
    except CorruptCheckpoint:
        return True


def _notices(base: BaseModel, named: _Named, left_out: Collection[str]) -> Iterator[str]:
    for name, (before, now) in named.items():
        yield f"{CONFIG_NAME}: {name} is {_shown(now)}, as in the input; {base.directory} has {_shown(before)}"
    if left_out:
        yield f"{listing(sorted(left_out))} of {base.directory} left out: the input's tokenizer has other tokens"


def _shown(ids: Any) -> str:
    return ", ".join(map(str, listed(ids))) or "none"
