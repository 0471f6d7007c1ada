"""Words that are no setting: accepted without effect, or refused with a suggestion."""

import difflib

from megaconv.errors import UsageError
from megatron_lite.settings import other_trainers
from megatron_lite.settings.config import flags
from megatron_lite.settings.earlier_flags import REPLACED, TODAY, refuse_all
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.megatron_flags import (
    ANY_NUMBER,
    NOT_YET,
    WITHOUT_EFFECT,
    refused_feature,
)

YAML_FLAGS = ("--yaml-cfg", "--config-file")
RECIPE_FLAG = "--recipe"


def take_without_effect(
    rest: list[str], *, rotates: bool, beside: FlagParser | None = None
) -> list[str]:
    """Return the flags without effect. Raises UsageError for all other flags, with suggestions.

    rotates: positions are rotary, so --no-position-embedding has no effect. beside: as in parse().
    """
    ignored, refused, position = list[str](), list[str](), 0
    choosing_nothing = WITHOUT_EFFECT | ({"no_position_embedding": 0} if rotates else {})
    while position < len(rest):
        word, equals, value = rest[position].partition("=")
        name = word.removeprefix("--").replace("-", "_")
        following = rest[position + 1 :]
        count = choosing_nothing.get(name, 1 if name in NOT_YET else ANY_NUMBER)
        values = 0 if equals else _values(count, following)
        if not word.startswith("--"):
            refused.append(unknown_flag(word, beside))
        elif name in NOT_YET:
            require_only(name, value or "".join(following[:1]))
            ignored.append(word)
        elif name in choosing_nothing:
            ignored.append(word)
        else:
            refused.append(refused_flag(word, name) or unknown_flag(word, beside))
        position += 1 + values
    refuse_all(refused)
    return ignored


def _values(count: int, following: list[str]) -> int:
    if count != ANY_NUMBER:
        return count
    return next((at for at, word in enumerate(following) if word.startswith("--")), len(following))


def require_only(name: str, value: object, where: str = "") -> None:
    """Raise UsageError unless a flag with one available value (NOT_YET) has that value. where: begins the message."""
    if str(value) != NOT_YET[name]:
        raise UsageError(
            f"{where}--{name.replace('_', '-')} {value} is not available; leave it out, or give {NOT_YET[name]}"
        )


def refused_flag(word: str, name: str) -> str | None:
    """Return why a known flag of Megatron-LM can't be taken. None if the flag is unknown."""
    if word in REPLACED:
        return f"{word}: {REPLACED[word]}"
    feature = refused_feature(name)
    return f"{word}: {feature} is not supported yet; leave it out" if feature else None


def unknown_flag(word: str, beside: FlagParser | None = None) -> str:
    """Return what to say of a word that no flag takes. beside: as in parse()."""
    listing = "--help-all" if beside is None else "--help"
    if not word.startswith("-"):
        order = "the words of `finetune MODEL DATA` come before all flags, and "
        hint = f"{order if beside is None else ''}{listing} lists the flags"
        return f"{word!r} is not a flag or a flag's value; {hint}"
    if word in TODAY:
        today = " ".join(TODAY[word])
        return f"unknown flag {word}; give {today}"
    meant = _of_command(word, beside) or _of_training(word)
    if meant is None:
        return f"unknown flag {word}; {listing} lists all flags"
    return f"unknown flag {word}; did you mean {meant}?"


def _of_command(word: str, beside: FlagParser | None) -> str | None:
    """Return the flag of a command's own that is most like an unknown one."""
    return None if beside is None else next(beside.nearest([word]), None)


def _of_training(word: str) -> str | None:
    """Return the flag of training that is most like an unknown one."""
    ours = other_trainers.FLAGS.get(word.replace("_", "-"))
    if ours is not None:
        return _with_short(ours)
    known = ["--" + name.replace("_", "-") for name in flags()]
    known += [*YAML_FLAGS, RECIPE_FLAG]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return _with_short(close[0]) if close else None


def _with_short(flag: str) -> str:
    """Return a flag with its short spelling, if it has one: `--tensor-model-parallel-size (--tp)`."""
    name = flag.removeprefix("--").replace("-", "_")
    short = flags()[name][1].metadata["short"] if name in flags() else None
    return f"{flag} ({short})" if short else flag
