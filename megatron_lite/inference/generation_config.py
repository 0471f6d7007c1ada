"""generation_config.json: the tokens that end a text, and how its authors sample the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.errors import CorruptCheckpoint
from formats.regular_files import read_json
from megaconv.errors import UsageError
from megatron_lite.inference.sampling import Sampling

GENERATION = "generation_config.json"
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of sampling that are read."""


def eos_of_generation(files: Mapping[str, Path]) -> list[int]:
    """Return the stop tokens of the checkpoint's file. Raises CorruptCheckpoint."""
    ids = _read(files).get("eos_token_id")
    if ids is None:
        return []
    several = ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int for token in several):
        raise CorruptCheckpoint(
            f"{files[GENERATION]}: eos_token_id should be a token's id, or a list of them, found {ids!r:.60}"
        )
    return several


def sampling_of_generation(files: Mapping[str, Path]) -> Sampling:
    """Return the sampling of the checkpoint's file; that of the model's probabilities if it states none.

    Raises CorruptCheckpoint.
    """
    found = _read(files)
    if found.get("do_sample") is False:  # transformers then ignores the rest
        return Sampling()
    stated = {name: found[name] for name in SAMPLED if found.get(name) is not None}
    for name, value in stated.items():
        whole = type(value) is int
        if not whole and (name == "top_k" or type(value) is not float):
            raise CorruptCheckpoint(
                f"{files[GENERATION]}: {name} should be a {'whole ' * (name == 'top_k')}number, found {value!r:.60}"
            )
    try:
        return Sampling(**stated)
    except UsageError as error:
        raise CorruptCheckpoint(f"{files[GENERATION]}: {error}") from error


def _read(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the file's content; {} without a file."""
    path = files.get(GENERATION)
    if path is None:
        return {}
    found = read_json(path, CONFIG_BYTES)
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{path}: is not a JSON object")
    return found
