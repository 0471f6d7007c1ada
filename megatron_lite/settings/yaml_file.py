"""Settings in a YAML file: a mapping of flags to values."""

import argparse
from pathlib import Path
from typing import Any, get_args

from megaconv.errors import UsageError
from megaconv.terminal import reason_of
from megatron_lite.settings.config import flags, subjects
from megatron_lite.settings.megatron_flags import NOT_YET, WITHOUT_EFFECT
from megatron_lite.settings.unknown_flags import refused_flag, require_only, unknown_flag
from megatron_lite.settings.value_types import element_type, type_hints, value_reader


def read_yaml(path: str, ignored: list[str]) -> dict[str, Any]:
    """Read a mapping of flags to values, with dashes or underscores. Subjects may be headings of their flags.

    ignored: receives the flags without effect. Raises UsageError.
    """
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {reason_of(error)}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: should be a mapping of flags to values")
    hints, values = type_hints(), {}
    for key, value in _flatten(document):
        name = str(key).replace("-", "_")
        if name in WITHOUT_EFFECT:
            if value is not None and value is not False:
                ignored.append(f"{path}: {key}")
        elif name in NOT_YET:
            require_only(name, value, f"{path}: ")
        elif name not in hints:
            word = "--" + name.replace("_", "-")
            raise UsageError(f"{path}: {refused_flag(word, name) or unknown_flag(word)}")
        elif value is not None:
            values[name] = _convert(path, name, value, hints[name])
    return values


def _flatten(document: dict[Any, Any]) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for key, value in document.items():
        pairs += value.items() if key in subjects() and isinstance(value, dict) else [(key, value)]
    return pairs


def _convert(path: str, name: str, value: Any, hint: Any) -> Any:
    """Convert a YAML value with the function that reads flags, because YAML 1.1 reads 1e-4 as text."""
    choices = flags()[name][1].metadata["choices"]
    read = value_reader(element_type(hint), choices)
    try:
        if get_args(hint):
            words = value if isinstance(value, list) else str(value).split()
            found = [read(str(word)) for word in words]
        else:
            found = read(str(value))
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(
            f"{path}: {name}: expected {getattr(hint, '__name__', hint)}, found {value!r:.60}"
        ) from None
    if choices and found not in choices:
        raise UsageError(f"{path}: {name}: choose one of {', '.join(choices)}; found {value!r:.60}")
    return found
