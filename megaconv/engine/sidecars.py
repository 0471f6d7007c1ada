"""The small files that make a model usable and travel along unread: tokenizer, generation settings, chat template, licence."""

from fnmatch import fnmatch
from pathlib import Path

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
