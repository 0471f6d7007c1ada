"""Embedding and head that are trained beside adapters: as whole modules, or rows of single tokens.

These are peft's modules_to_save and trainable_token_indices.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.huggingface.stored_names import name_in_class
from megaconv.model.config import ModelConfig
from megaconv.model.naming import HF_STACKED
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megatron_lite.models.lora.targets import refuse_commas
from megatron_lite.settings.learning import Lora
from megatron_lite.settings.options import LoRA

EMBEDDING, HEAD = "embedding.word_embeddings", "output_layer"
"""Megatron core's paths of the two modules."""
WORDS = {EMBEDDING: "the embedding", HEAD: "the head"}
"""Names of the two modules for people."""
_IN_LAYER = re.compile(r"\.\d+\.|\bmtp\b")
"""Part of the names of copies that layers for further tokens have."""
MODULES = {"embed.weight": EMBEDDING, "head.weight": HEAD, "head.bias": HEAD}
"""Canonical tensor -> Megatron core's path of its module."""


def beside_layers(options: LoRA, settings: Lora, config: ModelConfig) -> LoRA:
    """Return the options with what is trained in embedding and head. Raises UsageError."""
    whole = whole_modules(config, settings.lora_modules_to_save)
    rows = rows_of_tokens(config, settings.lora_trainable_token_indices)
    if whole and rows:
        raise UsageError(
            "--lora-trainable-token-indices and --lora-modules-to-save exclude each other: a whole module has the rows of all tokens"
        )
    return replace(options, whole=whole, rows=rows)


def whole_tensors(config: ModelConfig) -> dict[str, NativeTensor]:
    """Return the tensors of embedding and head by their names in transformers' files; a tied head's tensor too.

    Copies inside layers, which predict further tokens, are left out.
    """
    natives = unsharded_tensors(family(config.family).rows, config, HF_STACKED)
    return {
        native.name: native
        for native in natives
        if native.parts.keys() <= MODULES.keys() and not _IN_LAYER.search(native.name)
    }


def whole_modules(config: ModelConfig, words: Sequence[str]) -> tuple[str, ...]:
    """Return Megatron core's paths of the modules that --lora-modules-to-save names.

    A word is the end of a module's path in transformers or Megatron core. Each of the two modules of a tied model stands
    for both. Raises UsageError for other words.
    """
    paths = _paths(config)
    found: set[str] = set()
    for word in words:
        refuse_commas("--lora-modules-to-save", word)
        chosen = {core for path, core in paths if path == word or path.endswith(f".{word}")}
        if not chosen:
            known = ", ".join(sorted({path.rpartition(".")[2] for path, _ in paths}))
            raise UsageError(
                f"--lora-modules-to-save {word}: is no embedding and no head of this model; there are {known}"
            )
        found |= chosen
    if found and config.tie_embeddings:
        found = {EMBEDDING, HEAD}
    return tuple(sorted(found))


def rows_of_tokens(
    config: ModelConfig, words: Sequence[str]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return LoRA.rows of the tokens that --lora-trainable-token-indices names, in embedding and head.

    A word is a number, or two with a hyphen: the first and the last one of consecutive tokens. Raises UsageError.
    """
    tokens = sorted({token for word in words for token in _tokens(word, config.vocab)})
    canonical = [part for native in whole_tensors(config).values() for part in native.parts]
    modules = modules_of_tensors(config, canonical) if tokens else ()
    return tuple((module, tuple(tokens)) for module in modules)


def _tokens(word: str, vocab: int) -> range:
    refuse_commas("--lora-trainable-token-indices", word)
    first, hyphen, last = word.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not hyphen)):
        raise UsageError(
            f"--lora-trainable-token-indices {word}: is no number of a token; give numbers, as in 128256 128257 or 128256-128300"
        )
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise UsageError(
            f"--lora-trainable-token-indices {word}: the first token comes behind the last; write {last}-{first}"
        )
    if found[-1] >= vocab:
        raise UsageError(
            f"--lora-trainable-token-indices {word}: the model has the tokens 0 to {vocab - 1}"
        )
    return found


def modules_of_tensors(config: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return Megatron core's paths of the modules of canonical tensors; both of a tied model."""
    found = {MODULES[name] for name in names}
    return tuple(sorted({EMBEDDING, HEAD} if found and config.tie_embeddings else found))


def _paths(config: ModelConfig) -> list[tuple[str, str]]:
    """Return (path, Megatron core's path) of embedding and head, under transformers' names and core's."""
    found = []
    for name, native in whole_tensors(config).items():
        core = MODULES[next(iter(native.parts))]
        in_class = name_in_class(family(config.family), name)
        found += [(each.rpartition(".")[0], core) for each in (name, in_class)]
        found.append((core, core))
    return [*found, (HEAD, HEAD)] if config.tie_embeddings else found
