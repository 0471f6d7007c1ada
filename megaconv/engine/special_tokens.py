"""The tokens that begin, end and pad a text, where another tokenizer names others than the model's own."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.regular_files import parse_json, read_small
from megaconv.engine.token_lists import TokenList
from megaconv.errors import CorruptCheckpoint
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig

_ROLES = ("bos_token", "eos_token", "pad_token")
"""Keys of a tokenizer's settings."""
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
"""Files that name these tokens. The later one wins, as in transformers."""

SPECIAL_IDS = tuple(f"{role}_id" for role in _ROLES)
"""Fields of the model's description with the numbers of these tokens."""
Ids = Mapping[str, int]
"""Field of the model's description, such as `eos_token_id` -> the number of a token."""


def new_special_tokens(
    files: Mapping[str, Path | bytes],
    tokens: TokenList,
    earlier: Mapping[str, Path | bytes],
    config: ModelConfig,
) -> Ids:
    """The tokens that a tokenizer names and that neither the earlier one nor the model has in the same role.

    files, earlier: the files of the two tokenizers by name. Raises CorruptCheckpoint.
    """
    numbers = {text: number for number, text in {**tokens.usual, **tokens.added}.items()}
    before = _named(earlier)
    found: dict[str, int] = {}
    for role, text in _named(files).items():
        number = numbers.get(text)
        is_new = text != before.get(role) and number not in listed(getattr(config, f"{role}_id"))
        if number is not None and is_new:
            found[f"{role}_id"] = number
    return found


def _named(files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """Role -> the text of its token, as a tokenizer's files name it."""
    found: dict[str, str] = {}
    for name in _SETTINGS:
        if name not in files:
            continue
        file = files[name]
        where = str(file) if isinstance(file, Path) else name
        with well_formed(where):
            settings = read_object(file, where)
            for role in _ROLES:
                given = settings.get(role)
                text = given["content"] if isinstance(given, dict) else given
                if isinstance(text, str):
                    found[role] = text
    return found


def read_object(file: Path | bytes, where: str) -> dict[str, Any]:
    """The object in a small JSON file. Raises CorruptCheckpoint."""
    content = read_small(file, SIDECAR_BYTES) if isinstance(file, Path) else file
    try:
        found = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: is not a readable JSON file ({error})") from error
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{where}: should be an object, found {found!r:.40}")
    return found


def with_special_tokens(config: ModelConfig, ids: Ids) -> ModelConfig:
    """A model's description with these tokens. If several tokens end a text, a new one is the first of them."""
    changed: dict[str, Any] = {}
    for name, number in ids.items():
        before = getattr(config, name)
        changed[name] = (number, *before) if isinstance(before, tuple) else number
    return replace(config, **changed)


def generation_config(file: Path | bytes, ids: Ids) -> bytes:
    """A generation_config.json with these tokens. Tokens that ended a text still do. Raises CorruptCheckpoint."""
    where = str(file) if isinstance(file, Path) else "generation_config.json"
    settings = read_object(file, where)
    for name, number in ids.items():
        before = listed(settings.get(name))
        settings[name] = [number, *before] if name == "eos_token_id" and before else number
    return (json.dumps(settings, indent=2) + "\n").encode()


def listed(ids: Any) -> tuple[Any, ...]:
    """One number, several or none, as a tuple."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
