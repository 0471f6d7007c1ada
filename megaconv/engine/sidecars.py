"""The small files that make a model usable and travel along unread: tokenizer, generation settings, chat template, licence."""

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from formats.errors import UnsafeContent
from formats.output import PlainFile
from formats.regular_files import read_small

SIDECAR_DIRECTORY = "hf"
"""Where our Megatron outputs keep them, with config.json, beside the tracker file."""

_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json",
    "generation_config.json", "chat_template*", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
MAX_BYTES = 1 << 28


def find_sidecars(directory: Path) -> dict[str, Path]:
    """By file name. Code (*.py) is never taken."""
    if not directory.is_dir():
        return {}
    found = (path for path in sorted(directory.iterdir()) if any(fnmatch(path.name, pattern) for pattern in _PATTERNS))
    return {
        path.name: path
        for path in found
        if path.is_file() and path.suffix != ".py" and path.stat().st_size <= MAX_BYTES
    }


def copies(files: Mapping[str, Path]) -> dict[str, PlainFile]:
    """Files of a model's directory, to be written unchanged. Raises UnsafeContent for a link that leads out of it."""
    return {name: PlainFile(read_sidecar(path)) for name, path in files.items()}


def read_sidecar(path: Path) -> bytes:
    """Raises UnsafeContent for a link that leads out of its directory: what it leads to may be nobody's to pass on."""
    real, directory = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if directory not in real.parents and not _is_of_hub(real):
        raise UnsafeContent(
            f"{path}: is a link to {real}, outside of the model's directory; put the file itself there, or remove the link"
        )
    return read_small(path, MAX_BYTES)


def _is_of_hub(path: Path) -> bool:
    """Whether a file lies in the Hub's own cache, models--ORG--NAME/blobs, to which all of its snapshots link."""
    return path.parent.name == "blobs" and path.parent.parent.name.startswith("models--")
