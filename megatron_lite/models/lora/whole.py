"""Embedding and head, which may be trained whole beside adapters: peft's modules_to_save."""

from collections.abc import Sequence

from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor, unsharded_tensors

EMBEDDING, HEAD = "embedding.word_embeddings", "output_layer"
"""Megatron core's paths of the two modules."""
WORDS = {EMBEDDING: "the embedding", HEAD: "the head"}
"""Names of the two modules for people."""
_MODULES = {"embed.weight": EMBEDDING, "head.weight": HEAD, "head.bias": HEAD}
"""Canonical tensor -> Megatron core's path of its module."""


def whole_tensors(config: ModelConfig) -> dict[str, NativeTensor]:
    """Return the tensors of embedding and head by their names in transformers; a tied head's tensor too."""
    natives = unsharded_tensors(family(config.family).rows, config, HF)
    return {native.name: native for native in natives if native.parts.keys() <= _MODULES.keys()}


def whole_modules(config: ModelConfig, words: Sequence[str]) -> tuple[str, ...]:
    """Return Megatron core's paths of the modules that --lora-modules-to-save names.

    A word is the end of a module's path in transformers or Megatron core. Each of the two modules of a tied model stands
    for both. Raises UsageError for other words.
    """
    paths = _paths(config)
    found: set[str] = set()
    for word in words:
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


def modules_of_tensors(config: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return Megatron core's paths of the modules of canonical tensors; both of a tied model."""
    found = {_MODULES[name] for name in names}
    return tuple(sorted({EMBEDDING, HEAD} if found and config.tie_embeddings else found))


def _paths(config: ModelConfig) -> list[tuple[str, str]]:
    """Return (path, Megatron core's path) of embedding and head, under transformers' names and core's."""
    found = []
    for name, native in whole_tensors(config).items():
        core = _MODULES[next(iter(native.parts))]
        found += [(name.rpartition(".")[0], core), (core, core)]
    return found
