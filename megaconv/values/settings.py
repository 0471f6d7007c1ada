"""Values inside quantization_config. A value of a wrong kind is named by all keys that lead to it."""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint

_WORDS: dict[type, str] = {
    dict: "an object",
    str: "a word",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
}


def value_of(settings: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """The value of a key. where: the file and the keys that lead to the settings, for messages.

    Raises CorruptCheckpoint for a missing key, and for a value of another kind.
    """
    if key not in settings:
        raise CorruptCheckpoint(f"{where}.{key}: is missing, expected {_WORDS[kind]}")
    found = settings[key]
    if type(found) is not kind:
        raise CorruptCheckpoint(f"{where}.{key}: should be {_WORDS[kind]}, found {found!r:.60}")
    return found


def weights_of_groups(settings: Mapping[str, Any], where: str) -> dict[str, Mapping[str, Any]]:
    """The settings of the weights in each of config_groups, by the keys that lead to them.

    A group whose weights are null has quantized activations alone, and is left out. Raises CorruptCheckpoint like value_of.
    """
    found: dict[str, Mapping[str, Any]] = {}
    groups = value_of(settings, "config_groups", dict, where)
    for name in groups:
        path = f"{where}.config_groups"
        group = value_of(groups, name, dict, path)
        if "weights" in group and group["weights"] is None:
            continue
        found[f"{path}.{name}.weights"] = value_of(group, "weights", dict, f"{path}.{name}")
    return found
