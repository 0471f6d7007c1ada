"""Refuses options that have no effect on an output."""

from collections.abc import Collection
from dataclasses import Field, fields
from typing import Any

from megaconv.errors import UsageError
from megaconv.options.option import entry_of
from megaconv.options.values import byte_size, size_text
from megaconv.options.writing import SaveOptions

_FOR_ALL = ("allow_lossy", "extra", "given")

_INSTEAD = {
    ("gguf", "quantize"): "--option gguf_type=q4_0 (or another type) quantizes its matrices"
}
"""(saver, field) -> another option with the effect that the caller may expect."""


def refuse_unused(saver: str, used: Collection[str], options: SaveOptions) -> None:
    """Raises UsageError for an option that has no effect on this output, because the caller expects an effect.

    used: fields of SaveOptions that the saver reads. A default counts as chosen only if the caller gave it. A parallel
    size of 1 never counts as chosen.
    """
    unset = SaveOptions()
    for each in fields(options):
        value = getattr(options, each.name)
        size_of_one = each.name in ("tp", "pp", "vpp", "ep", "etp") and value == 1
        chosen = value != getattr(unset, each.name) or each.name in options.given
        if each.name not in (*used, *_FOR_ALL) and chosen and not size_of_one:
            instead = _INSTEAD.get((saver, each.name), "leave it out")
            raise UsageError(
                f"{_spelled(each, value)}: has no effect with --saver {saver}; {instead}"
            )


def _spelled(each: "Field[Any]", value: Any) -> str:
    """A chosen field as the user gave it, such as `--dist-files 4`."""
    if each.name == "split":
        return "a layer split"
    entry = entry_of(each)
    name = f"--{each.name.replace('_', '-')}" if entry is None else entry.name
    if isinstance(value, bool):
        return name
    is_size = entry is not None and entry.read is byte_size
    return f"{name} {size_text(value) if is_size else value}"
