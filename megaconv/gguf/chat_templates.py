"""The chat templates of a GGUF file: the default one, and further ones by name, such as `tool_use`.

    tokenizer.chat_template           the default
    tokenizer.chat_template.NAME      a further one
    tokenizer.chat_templates          the names of the further ones

transformers keeps several as a list in tokenizer_config.json, or in files. Source: gguf-py 0.19, add_chat_template.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from formats.gguf import Value

_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
DEFAULT_FILE = "chat_template.jinja"
_DIRECTORY = "additional_chat_templates/"
_DEFAULT = "default"


def is_template_file(name: str) -> bool:
    """True for a file with one template."""
    return name == DEFAULT_FILE or name.startswith(_DIRECTORY)


def template_values(settings: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Value]:
    """GGUF metadata of all chat templates.

    settings: tokenizer_config.json. texts: the contents of the files that `is_template_file` accepts, which come first.
    """
    templates = dict(_listed(settings.get("chat_template")))
    for file, text in texts.items():
        name = _DEFAULT if file == DEFAULT_FILE else PurePath(file).stem
        templates[_usable(name)] = text
    default = templates.pop(_DEFAULT, None)
    found = {f"{_KEY}.{name}": Value("string", text) for name, text in templates.items()}
    if templates:
        found[_NAMES] = Value("string", sorted(templates))
    if default is not None:
        found[_KEY] = Value("string", default)
    return found


def _listed(given: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, template) of the value in tokenizer_config.json."""
    for each in given if isinstance(given, list) else [{"name": _DEFAULT, "template": given}]:
        name, template = each.get("name"), each.get("template")
        if isinstance(name, str) and name and isinstance(template, str):
            yield _usable(name), template


def _usable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name)


def stored_templates(keys: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The value of `chat_template` in tokenizer_config.json; None for a file without templates."""
    named = {
        name.removeprefix(f"{_KEY}."): text
        for name, text in keys.items()
        if name.startswith(f"{_KEY}.") and isinstance(text, str)
    }
    default = keys.get(_KEY)
    if not isinstance(default, str):
        default = None
    if not named:
        return default
    if default is not None:
        named = {_DEFAULT: default, **named}
    return [{"name": name, "template": text} for name, text in named.items()]
