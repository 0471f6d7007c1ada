"""One setting: a field of a dataclass, from which its flag, its YAML key and its line in `--help` are made."""

from dataclasses import field
from typing import Any


def flag(default: Any, text: str, *, choices: tuple[str, ...] = (), short: str | None = None) -> Any:
    """A setting with its default, what `--help` says about it, and a shorter flag beside Megatron's."""
    return field(default=default, metadata={"help": text, "choices": choices, "short": short})
