"""The form of an embedding model in sentence-transformers' files: its prompts, the tokens of a text, and their pooling.

    modules.json                         the modules of the model: a Transformer, a Pooling, a Normalize
    1_Pooling/config.json                which tokens' hidden states are pooled
    config_sentence_transformers.json    prompts by name: the texts that precede a query and a document
    sentence_bert_config.json            the most tokens of a text

A model without these files is pooled at its last token, and has no prompts. Source: sentence-transformers 5.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_json
from megaconv.errors import NotExpressible, UsageError
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_lite.settings.embedding import LAST, MEAN

QUERY, DOCUMENT = "query", "document"
"""Names of prompts."""

_MODULES, _POOLING, _PROMPTS = "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"  # fmt: skip
_LENGTH = "sentence_bert_config.json"
_MODES = {LAST: "pooling_mode_lasttoken", MEAN: "pooling_mode_mean_tokens"}
"""The keys of sentence-transformers up to 5."""
_WORDS = {LAST: "lasttoken", MEAN: "mean"}
"""The values of `pooling_mode`, since sentence-transformers 6."""
_KINDS = ("Transformer", "Pooling", "Normalize")
"""The kinds of modules that are understood."""


@dataclass(frozen=True)
class EmbeddingForm:
    """The prompts that precede texts, and the tokens that are pooled."""

    pooling: str = LAST
    """One of settings.embedding.POOLINGS."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name, such as QUERY and DOCUMENT."""
    default_prompt: str | None = None
    """The name of the prompt for texts of no stated kind; None: no prompt."""

    def prompt(self, name: str) -> str:
        """Return the text that precedes texts of a kind; without a prompt of this name, none."""
        return self.prompts.get(name, "")


def read_form(files: Mapping[str, Path]) -> EmbeddingForm:
    """Read the form from the small files beside a model. files: by their paths below its directory.

    Raises CorruptCheckpoint for files that are not sentence-transformers', NotExpressible for another module or pooling.
    """
    for module in _listed(files):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _KINDS:
            raise NotExpressible(
                f"{files[_MODULES]}: the model has a module {kind}, which isn't computed; supported are {', '.join(_KINDS)}"
            )
    prompts = _read_prompts(files)
    return EmbeddingForm(_read_pooling(files), prompts, _read_default(files, prompts))


def read_length(files: Mapping[str, Path]) -> int | None:
    """Return the most tokens of a text by sentence_bert_config.json; None if it doesn't state them. Raises CorruptCheckpoint."""
    found = _read_object(files, _LENGTH).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        raise CorruptCheckpoint(
            f"{files[_LENGTH]}: max_seq_length should be a number of tokens, found {found!r:.60}"
        )
    return found


def _listed(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the modules of modules.json; [] without the file."""
    if _MODULES not in files:
        return []
    found = read_json(files[_MODULES], SIDECAR_BYTES)
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise CorruptCheckpoint(f"{files[_MODULES]}: should list modules, each an object")
    return found


def _read_pooling(files: Mapping[str, Path]) -> str:
    """Return the pooling of 1_Pooling/config.json; LAST without the file."""
    raw = _read_object(files, _POOLING)
    if not raw:
        return LAST
    word = raw.get("pooling_mode")
    modes = [name for name, key in _MODES.items() if raw.get(key) or word == _WORDS[name]]
    known = ("pooling_mode", *_MODES.values())
    others = [
        key for key in raw if key.startswith("pooling_mode") and raw[key] and key not in known
    ]
    if len(modes) != 1 or others:
        raise NotExpressible(
            f"{files[_POOLING]}: supported is the pooling of the last token (lasttoken) or of all tokens (mean), found {raw!r:.200}"
        )
    if modes == [MEAN] and raw.get("include_prompt") is False:
        raise NotExpressible(
            f"{files[_POOLING]}: include_prompt is false, but tokens of prompts are always part of the mean here"
        )
    return modes[0]


def _read_prompts(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the prompts of config_sentence_transformers.json; {} without the file."""
    found = _read_object(files, _PROMPTS).get("prompts") or {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise CorruptCheckpoint(
            f"{files[_PROMPTS]}: prompts should be texts by name, found {found!r:.100}"
        )
    return found


def _read_default(files: Mapping[str, Path], prompts: Mapping[str, str]) -> str | None:
    """Return the name of the default prompt, if config_sentence_transformers.json has one."""
    name = _read_object(files, _PROMPTS).get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise CorruptCheckpoint(
            f"{files[_PROMPTS]}: default_prompt_name should be the name of a prompt, found {name!r:.60}"
        )
    return name


def _read_object(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """Return a file's object; {} without the file. Raises CorruptCheckpoint."""
    if name not in files:
        return {}
    found = read_json(files[name], SIDECAR_BYTES)
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{files[name]}: is not a JSON object")
    return found


def form_files(
    form: EmbeddingForm,
    hidden: int,
    length: int,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Return sentence-transformers' files of a model, by name. hidden: the width of an embedding. length: tokens of a text.

    beside: the files of the checkpoint that the model started from. Their longest text, other prompts and keys of prompts stay.
    """
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(_KINDS, ("", "1_Pooling", "2_Normalize"), strict=True))
    ]  # fmt: skip
    modes = {key: name == form.pooling for name, key in _MODES.items()}
    pooling = {"word_embedding_dimension": hidden, **modes, "include_prompt": True}
    earlier = json.loads(beside.get(_PROMPTS, b"{}"))
    kept = {"default_prompt_name": form.default_prompt, "similarity_fn_name": "cosine"} | earlier
    prompts = kept | {"prompts": {**(earlier.get("prompts") or {}), **form.prompts}}
    written = {
        _MODULES: modules,
        _POOLING: pooling,
        _PROMPTS: prompts,
        _LENGTH: {"max_seq_length": length, "do_lower_case": False},
    }
    if _LENGTH in beside:
        del written[_LENGTH]
    return {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in written.items()}


def text_tokens(tokenizer: Tokenizer, text: str, length: int | None = None) -> list[int]:
    """Return the tokens of a text, with those that the tokenizer adds around texts. length: the most tokens; None: all.

    Raises UsageError for a text without a token, ValueError or TypeError if the tokenizer refuses the text.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        shortens = {} if length is None else {"truncation": True, "max_length": length}
        found: list[int] = tokenizer.inner(text, verbose=False, **shortens).input_ids
    else:
        found = [*tokenizer.begin, *tokenizer.tokenize(text)][:length]
    if not found:
        raise UsageError("a text without a token has no embedding")
    return found


def end_tokens(tokenizer: Tokenizer) -> int:
    """Return the number of special tokens that the tokenizer adds behind a text."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return 0
    whole, text = text_tokens(tokenizer, "a"), tokenizer.tokenize("a")
    before = next(
        (place for place in range(len(whole)) if whole[place : place + len(text)] == text), 0
    )
    return len(whole) - before - len(text)
