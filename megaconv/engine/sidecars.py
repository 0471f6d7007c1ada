"""The small files that are copied unchanged: tokenizer, processors, generation settings, chat template, licence."""

import logging
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from formats.ceilings import SIDECAR_BYTES
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.output import PlainFile
from formats.regular_files import read_json, read_small
from megaconv.model.ir import Header

_log = logging.getLogger("megaconv")

SIDECAR_DIRECTORY = "hf"
"""The directory with these files and config.json in megaconv's Megatron outputs, beside the tracker file."""

CHAT_TEMPLATES = "additional_chat_templates"
"""The directory in which transformers keeps further chat templates."""

_MODULES, _MODULE_DIRECTORY = "modules.json", "[0-9]*_*"
"""The list of sentence-transformers' modules, and the directory of each: `1_Pooling` with a config.json."""
_FURTHER_WEIGHTS = ("value_head.safetensors", "value_head.bin")
"""Weights of a value head beside a model, as TRL and LLaMA-Factory store them."""

_OF_TOKENIZERS = (
    # Those of the tokenizers library and of transformers, SentencePiece, tiktoken, byte-pair and word-piece
    # vocabularies.
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*.json", "vocab.txt", "vocab.bpe", "encoder.json", "merges.txt",
    "spiece*.model", "sentencepiece*.model", "*.spm", "spm*.model", "*bpe*.model", "*.tiktoken", "tiktoken.model", "tekken.json",
    "bpe.codes", "dict.txt", "normalizer.json", "audio_tokenizer_config.json", "chat_template*",
)  # fmt: skip
"""Patterns of a tokenizer's files, in lower case, because names are compared in lower case."""
_OF_VECTORS = (_MODULES, "sentence_*config.json", "config_sentence_transformers.json")
"""Patterns of sentence-transformers' files, in lower case: its modules, the longest text, prompts."""
_PATTERNS = (
    # Pre- and postprocessing: images, audio, several inputs, generated text.
    "preprocessor_config.json", "processor_config.json", "image_processor*.json", "video_preprocessor_config.json",
    "feature_extractor*.json", "generation_config.json",
    *_OF_VECTORS,
)  # fmt: skip
"""Patterns of further files, in lower case."""
_TERMS = (
    "license*", "licence*", "*license*.txt", "*license*.md", "notice*", "use_policy*", "usage_policy*", "copying*",
)  # fmt: skip
"""Patterns of files with the terms of use of a model."""
_NEVER = (
    ".py", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".npy", ".index.json",
)  # fmt: skip
"""Suffixes of weights, and of code, which nobody should run unread."""


def find_sidecars(directory: Path) -> dict[str, Path]:
    """The sidecars by path below the directory.

    Code (*.py) and weights are never included. A warning names a file that is too large, and a directory that is a link.
    """
    if not directory.is_dir():
        return {}
    found = [path for path in sorted(directory.iterdir()) if is_sidecar(path.name)]
    inside = [(CHAT_TEMPLATES, "*.jinja")]
    if (directory / _MODULES).is_file():
        inside.append((_MODULE_DIRECTORY, "*.json"))
    for subdirectories, files in inside:
        for subdirectory in sorted(directory.glob(subdirectories)):
            found += sorted(subdirectory.glob(files)) if _is_own(subdirectory) else []
    return {
        str(path.relative_to(directory)): path
        for path in found
        if path.is_file() and _is_small(path)
    }


def _is_own(subdirectory: Path) -> bool:
    """False for a link, with a warning: the files behind it may be private."""
    if subdirectory.is_symlink():
        _log.warning(
            "%s: is a link to a directory, whose files are left out; put the directory itself there",
            subdirectory,
        )
        return False
    return subdirectory.is_dir()


def is_sidecar(name: str) -> bool:
    lower = name.lower()
    return not lower.endswith(_NEVER) and any(
        fnmatchcase(lower, pattern) for pattern in (*_OF_TOKENIZERS, *_PATTERNS, *_TERMS)
    )


def is_of_tokenizer(name: str) -> bool:
    """True for a sidecar that belongs to the tokenizer, its chat templates included. name: its path below the directory."""
    lower = name.lower()
    return lower.startswith(f"{CHAT_TEMPLATES}/") or any(
        fnmatchcase(lower, pattern) for pattern in _OF_TOKENIZERS
    )


def is_of_vectors(name: str) -> bool:
    """True for a sidecar of sentence-transformers, which say how a model makes vectors of texts. name: see is_of_tokenizer."""
    lower = name.lower()
    return fnmatchcase(lower, f"{_MODULE_DIRECTORY}/*") or any(
        fnmatchcase(lower, pattern) for pattern in _OF_VECTORS
    )


def _is_small(path: Path) -> bool:
    size = path.stat().st_size
    if size > SIDECAR_BYTES:
        _log.warning(
            "%s: has %s bytes, and no tokenizer has more than %s; it is left out",
            path,
            f"{size:,}",
            f"{SIDECAR_BYTES:,}",
        )
    return size <= SIDECAR_BYTES


def code_left_out(directory: Path) -> tuple[str, ...]:
    """Names of the Python files of a Hugging Face model, which some tokenizers and models need."""
    if not (directory / "config.json").is_file():
        return ()
    return tuple(sorted(path.name for path in directory.glob("*.py")))


def modules_left_out(directory: Path) -> tuple[str, ...]:
    """Names of files beside a Hugging Face model with weights of further modules: a value head, a dense layer behind
    pooling. They end with a slash for a module of sentence-transformers whose directory is missing."""
    if not (directory / "config.json").is_file():
        return ()
    found = [name for name in _FURTHER_WEIGHTS if (directory / name).is_file()]
    if (directory / _MODULES).is_file():
        inside = sorted(directory.glob(f"{_MODULE_DIRECTORY}/*"))
        found += [
            str(path.relative_to(directory))
            for path in inside
            if path.name.lower().endswith((".safetensors", ".bin"))
        ]
        for name in _poolings(directory):
            if not os.path.isdir(directory / name):  # noqa: PTH112
                found.append(f"{name}/")
    return tuple(found)


def _poolings(directory: Path) -> list[str]:
    """The directories of modules that modules.json lists and that can't be without files: pooling and dense layers.

    The names come from a file. os.path.isdir, unlike Path.is_dir, takes names that are too long.
    """
    listed = read_json(directory / _MODULES, SIDECAR_BYTES)
    modules = (
        [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    )
    kinds = ("Pooling", "Dense")
    return [
        str(each["path"])
        for each in modules
        if str(each.get("type")).endswith(kinds) and each.get("path")
    ]


def copies(files: Mapping[str, Path]) -> dict[str, PlainFile]:
    """Files of a model's directory, to be written unchanged. Raises UnsafeContent for a link that leads out of it."""
    return {name: PlainFile(read_sidecar(path)) for name, path in files.items()}


def small_files(header: Header) -> dict[str, PlainFile]:
    """The small files of a model, to be written beside its weights. Raises UnsafeContent like `copies`."""
    made = {name: PlainFile(content) for name, content in header.made.items()}
    return copies(header.files) | made


def read_sidecar(path: Path) -> bytes:
    """The content of a sidecar.

    Raises UnsafeContent for a link that leads out of the directory: its target may be private. Raises CorruptCheckpoint
    for a file that was never downloaded: without the error, the output would silently lack its tokenizer.
    """
    elsewhere = leads_out(path)
    if elsewhere is not None:
        raise UnsafeContent(
            f"{path}: is a link to {elsewhere}, outside of the model's directory; put the file itself there, or remove the link"
        )
    content = read_small(path, SIDECAR_BYTES)
    instead = mistaken(content[:SEEN_BYTES])
    if instead and not any(fnmatchcase(path.name.lower(), pattern) for pattern in _TERMS):
        # Only a licence may be a web page.
        raise CorruptCheckpoint(f"{path}: {instead}")
    return content


def leads_out(path: Path) -> Path | None:
    """The target of a link that leads out of its directory; None otherwise, and for links in the Hub's cache."""
    real, directory = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    return None if directory in (real, *real.parents) or _is_of_hub(real) else real


def _is_of_hub(path: Path) -> bool:
    """True if a file lies in the Hub's own cache, models--ORG--NAME/blobs, to which its snapshots link."""
    return path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")
