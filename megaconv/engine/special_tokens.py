"""The tokens that begin, end and pad a text, where another tokenizer names others than the model's own."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from formats.small_files import SmallFile
from megaconv.engine.token_lists import Files, TokenList
from megaconv.errors import CorruptCheckpoint
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig

_ROLES = ("bos_token", "eos_token", "pad_token")
"""Keys of a tokenizer's settings."""
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name these tokens."""
SPECIAL_IDS = tuple(f"{role}_id" for role in _ROLES)
"""Fields of the model's description with the numbers of these tokens."""
_EOS = "eos_token_id"
_FURTHER = ("unk_token", "sep_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Further keys that name tokens: one each, or a list or an object of several."""


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that begin, end and pad a text with a new tokenizer, where the old one had others."""

    numbers: Mapping[str, int] = field(default_factory=dict)
    """Field of the model's description, such as `eos_token_id` -> the number of a token."""
    known: Collection[int] = ()
    """The numbers of all tokens of the tokenizer. Others that ended a text no longer do."""
    in_config: bool = False
    """True if config.json alone says what ends a text, since there is no generation_config.json."""

    def of(self, config: ModelConfig) -> ModelConfig:
        """A model's description with these tokens. If several tokens end a text, the new one is the first of them."""
        changed: dict[str, Any] = {}
        for name, number in self.numbers.items():
            before = getattr(config, name)
            several = name == _EOS and (isinstance(before, tuple) or self.in_config)
            found = self._with(number, before, several=several)
            changed[name] = found[0] if len(found) == 1 else found
        return replace(config, **changed)

    def generation_config(self, file: SmallFile) -> bytes | None:
        """A generation_config.json with these tokens; None if it has them. Tokens that ended a text still do.

        Raises CorruptCheckpoint.
        """
        settings, changed = _object(file), self.of_generation(file)
        return None if changed == settings else (json.dumps(changed, indent=2) + "\n").encode()

    def of_generation(self, file: SmallFile) -> dict[str, Any]:
        """The settings of a generation_config.json with these tokens."""
        settings = _object(file)
        changed = dict(settings)
        for name, number in self.numbers.items():
            found = self._with(number, settings.get(name), several=name == _EOS)
            changed[name] = found[0] if len(found) == 1 else list(found)
        return changed

    def _with(self, number: int, before: Any, *, several: bool) -> tuple[int, ...]:
        """The tokens of a role: those before if they are right, else a new one and those of them that the tokenizer has."""
        current = listed(before)
        if number in current and all(each in self.known for each in current):
            return current
        others = (each for each in current if each != number and each in self.known)
        return (number, *others) if several else (number,)


def new_special_tokens(
    files: Files,
    tokens: TokenList,
    earlier: Files,
    earlier_tokens: TokenList | None,
    config: ModelConfig,
) -> SpecialTokens:
    """The tokens that a tokenizer names, where the earlier one named others or the model's are no tokens of it.

    files, earlier: the files of the two tokenizers. earlier_tokens: None if they can't be compared. Raises CorruptCheckpoint.
    """
    numbers = numbers_of(tokens)
    known = frozenset(numbers.values())
    numbers_before = {} if earlier_tokens is None else numbers_of(earlier_tokens)
    before = _named(earlier)
    found: dict[str, int] = {}
    for role, text in _named(files).items():
        number, current = numbers.get(text), listed(getattr(config, f"{role}_id"))
        is_other = number != numbers_before.get(before.get(role, ""))
        if number is not None and (is_other or not known.issuperset(current)):
            found[f"{role}_id"] = number
    return SpecialTokens(found, known)


def largest_token(settings: Any) -> int:
    """The largest number of a token that a config.json or generation_config.json names; -1 if it names none."""
    if isinstance(settings, Mapping):
        return max((_largest(key, value) for key, value in settings.items()), default=-1)
    return -1


def _largest(key: str, value: Any) -> int:
    if isinstance(value, Mapping):
        return largest_token(value)
    if not key.endswith(("_token_id", "_token_index")):
        return -1
    return max((each for each in listed(value) if type(each) is int), default=-1)


def without_numbers(files: Files, tokens: TokenList) -> list[str]:
    """The texts that a tokenizer's settings call tokens and that have no number. transformers adds them when it loads them."""
    numbers = numbers_of(tokens)
    named = [*_named(files, (*_ROLES, *_FURTHER)).values(), *_further(files)]
    return [text for text in dict.fromkeys(named) if text not in numbers]


def numbers_of(tokens: TokenList) -> dict[str, int]:
    """Text -> number of all tokens."""
    return {text: number for number, text in {**tokens.usual, **tokens.added}.items()}


def _further(files: Files) -> Iterator[str]:
    """Yield the texts in lists of special tokens."""
    for name, settings in _settings(files):
        with well_formed(name):
            for key in _LISTS:
                given = settings.get(key) or ()
                for each in given.values() if isinstance(given, dict) else given:
                    yield each["content"] if isinstance(each, dict) else str(each)


def _settings(files: Files) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, content) of the files that name special tokens. The later one wins.

    Source: transformers 5, tokenization_utils_base.py, which reads the map only beside settings without added_tokens_decoder.
    """
    for name in _SETTINGS:
        if name not in files:
            continue
        settings = _object(files[name])
        yield files[name].where, settings
        if "added_tokens_decoder" in settings:
            return


def _named(files: Files, roles: Sequence[str] = _ROLES) -> dict[str, str]:
    """Role -> the text of its token, as a tokenizer's files name it."""
    found: dict[str, str] = {}
    for where, settings in _settings(files):
        with well_formed(where):
            for role in roles:
                if role not in settings:
                    continue
                given = settings[role]
                text = given["content"] if isinstance(given, dict) else given
                found.pop(role, None)
                if isinstance(text, str):
                    found[role] = text
    return found


def _object(file: SmallFile) -> dict[str, Any]:
    """The object in a JSON file. Raises CorruptCheckpoint."""
    found = file.json()
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{file.where}: should be an object, found {found!r:.40}")
    return found


def listed(ids: Any) -> tuple[Any, ...]:
    """One number, several or none, as a tuple."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
