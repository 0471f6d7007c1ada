"""Inputs that live on the Hugging Face Hub: `hf://org/name@revision`, or `org/name` where no such path exists here."""

import re
from pathlib import Path
from typing import Any

from megaconv.errors import CheckpointError, UsageError

Place = Path | str
"""Where an input is: a local path, or a URI, for the loader that takes its scheme."""

_SCHEME = "hf://"
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_PATTERNS = [
    *("*.json", "*.safetensors", "*.bin"),
    *("tokenizer*", "*.model", "*.txt", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.jinja"),
    *(
        "LICENSE*",
        "LICENCE*",
        "license*",
        "licence*",
        "NOTICE*",
        "Notice*",
        "notice*",
        "USE_POLICY*",
        "USAGE_POLICY*",
        "COPYING*",
    ),
]
"""Configuration, weights, and whatever travels along (megaconv/engine/sidecars.py); code is never downloaded."""


def scheme_of(uri: str) -> str:
    """`store` of store://bucket/model; empty where it is no URI."""
    match = _URI.fullmatch(uri)
    return match[1].lower() if match else ""


def resolve(place: str) -> Place:
    """A local path for an input; downloads it (into the Hub's own cache) when it is a Hub id. Other URIs stay as they are.

    Raises CheckpointError.
    """
    if not place:
        raise UsageError("the path to read is empty; is a variable unset that it was made of?")
    if not place.startswith(_SCHEME) and scheme_of(place):
        return place
    if not place.startswith(_SCHEME) and (Path(place).exists() or not _NAME.fullmatch(place)):
        return Path(place)
    name, _, revision = place.removeprefix(_SCHEME).partition("@")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{place}: is not a Hub id; expected hf://organisation/name or hf://organisation/name@revision"
        )
    return _download(place, name, revision or None)


def _download(place: str, name: str, revision: str | None) -> Path:
    import os

    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    both = "" if place.startswith(_SCHEME) else f"there is no path {place!r} here, and "
    try:
        # One request, without the retries that a listing has: a Hub that isn't there is reported at once.
        found = HfApi().model_info(name, revision=revision, timeout=float(os.environ["HF_HUB_ETAG_TIMEOUT"]))
        files = [sibling.rfilename for sibling in found.siblings or ()]
        # Where both are there, the safetensors files are the ones that will be read.
        skip = ["*.bin"] if any(file.endswith(".safetensors") for file in files) else []
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=[*skip, "*.py", "*/*"])
        )
    except Exception as error:  # the client's network errors have no class in common with its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        try:
            kept: dict[str, Any] = {"allow_patterns": _PATTERNS, "ignore_patterns": ["*.bin", "*.py", "*/*"]}
            return Path(snapshot_download(name, revision=revision, local_files_only=True, **kept))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
            raise CheckpointError(
                f"{place}: {both}the model can't be fetched from the Hugging Face Hub: {reason}",
                code="hub-unreachable",
            ) from error
