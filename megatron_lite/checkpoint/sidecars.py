"""Collects the files that accompany a checkpoint: config.json, which names the family, and the tokenizer for an export."""

import json
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from megaconv.engine.sidecars import find_sidecars, read_sidecar
from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megatron_lite.data.beside import CONFIG
from megatron_lite.data.tokenizer import (
    BERT_TYPES,
    LOWER_CASE,
    HuggingFaceTokenizer,
    Tokenizer,
    bert_config,
    type_of_files,
)
from megatron_lite.settings.learning import Data

CHAT_TEMPLATE = "chat_template.jinja"

_OF_ANOTHER_MODEL = (
    "license*", "licence*", "*license*.txt", "*license*.md", "notice*", "use_policy*", "usage_policy*", "copying*", "generation_config*",
    "*processor*", "feature_extractor*",
)  # fmt: skip
"""Files that are often stored with a tokenizer but describe the model that the tokenizer was made for."""


def sidecars(
    data: Data,
    tokenizer: Tokenizer,
    config: ModelConfig,
    dropouts: Mapping[str, float],
    beside_start: Mapping[str, Path] | None,
    inside_start: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Return the contents of the files by name.

    beside_start: the files of the checkpoint that the run starts from. inside_start: files that it holds itself, as a
    GGUF file its tokenizer. A tokenizer from the flags replaces the checkpoint's.
    """
    given = tokenizer_files(data, tokenizer)
    files: dict[str, bytes] = {}
    for name, path in (beside_start or {}).items():
        content = read_sidecar(path)
        if not given or _says_something_else(name):
            files[name] = content
    files |= given or inside_start
    if data.chat_template is not None:
        template = Path(data.chat_template)
        files[CHAT_TEMPLATE] = read_sidecar(template)
    try:
        config_json = family(config.family).config_json(config, dropouts)
    except NotExpressible:
        return files
    files[CONFIG_NAME] = config_json
    return files


def tokenizer_files(data: Data, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of the tokenizer that the flags name, or {} if no flag names one."""
    if data.vocab_file:
        return _vocabulary_files(data, Path(data.vocab_file))
    if data.tokenizer_model is None:
        return {}
    place = Path(data.tokenizer_model)
    if place.name == "tokenizer.json":
        place = place.parent
    if place.is_file():
        return {place.name if place.suffix == ".json" else "tokenizer.model": read_sidecar(place)}
    if place.is_dir():
        found = find_sidecars(place)
        return {
            name: read_sidecar(path)
            for name, path in found.items()
            if not _says_something_else(name)
        }
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    with tempfile.TemporaryDirectory() as directory:  # the tokenizer came from the Hub
        tokenizer.save(directory)
        return {
            path.name: path.read_bytes()
            for path in sorted(Path(directory).iterdir())
            if path.is_file()
        }


def _vocabulary_files(data: Data, vocabulary: Path) -> dict[str, bytes]:
    """Return the files of --vocab-file, under the names that transformers has for them."""
    content = read_sidecar(vocabulary)
    if data.merge_file:
        return {"vocab.json": content, "merges.txt": read_sidecar(Path(data.merge_file))}
    kind = data.tokenizer_type or type_of_files(None, data.vocab_file, None)
    if kind not in BERT_TYPES:
        return {"vocab.txt": content}
    config = json.dumps(bert_config(lower=kind == LOWER_CASE), indent=2)
    return {"vocab.txt": content, CONFIG: config.encode()}


def _says_something_else(name: str) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in _OF_ANOTHER_MODEL)
