"""A fingerprint of the files that decide the vectors of an embedder."""

from pathlib import Path

import blake3

_ENDINGS = (".safetensors", ".bin", ".json", ".txt", ".model")


def hash_of_weights(directory: Path) -> str:
    """Return a hash of the weights, configuration and tokenizer in a directory and below it."""
    digest = blake3.blake3()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.suffix in _ENDINGS:
            digest.update(f"{path.relative_to(directory)}\n".encode())
            digest.update_mmap(path)
    return digest.hexdigest()[:32]
