"""One setting: a dataclass field that defines its flag, its YAML key and its line in `--help`."""

from collections.abc import Collection
from dataclasses import field
from typing import Any


def flag(
    default: Any,
    text: str,
    *,
    choices: Collection[str] = (),
    short: str | None = None,
    remote: bool = False,
    samples: bool = False,
) -> Any:
    """Return a field with a default. text: the flag's help. short: a shorter name besides Megatron's.

    remote: whether the value may be a URI, such as hf://org/name; in other flags a URI is refused.
    samples: whether the value determines the samples or their loss. A continued run reports a change of it.
    """
    metadata = {
        "help": text,
        "choices": choices,
        "short": short,
        "remote": remote,
        "samples": samples,
    }
    return field(default=default, metadata=metadata)
