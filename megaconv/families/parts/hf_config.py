"""A config.json as a file: read, checked for quantized weights, and written again with the model's own keys where they are known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.errors import CorruptCheckpoint, UnsupportedInput
from megaconv.families.parts.keys import CONFIG_NAME

QUANT_METHODS = ("fp8", "mxfp4", "modelopt")
"""quant_method of config.json."""


def load_config(path: Path) -> dict[str, Any]:
    """Raises CorruptCheckpoint when the file is not a JSON object."""
    if not path.exists():
        raise CorruptCheckpoint(
            f"{path}: no such file; a Hugging Face model directory has a {CONFIG_NAME}", code="missing-file"
        )
    config = read_json(path, CONFIG_BYTES)
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


QUANTIZATION = "quantization_config"


def quantization(config: Mapping[str, Any]) -> Any:
    """What a config.json says of quantized weights: for all of a model, or (Kimi K2.5) for the language model inside; None: nothing."""
    inside = config.get("text_config")
    return config.get(QUANTIZATION) or (inside.get(QUANTIZATION) if isinstance(inside, Mapping) else None)


MODELOPT_FILE = "hf_quant_config.json"


def with_modelopt_file(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """A config.json with what ModelOpt's own file beside it says, where it doesn't say it itself. Raises CorruptCheckpoint."""
    if quantization(config) or not (directory / MODELOPT_FILE).is_file():
        return config
    found = load_config(directory / MODELOPT_FILE).get("quantization")
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{directory / MODELOPT_FILE}: has no `quantization`")
    return {**config, QUANTIZATION: {"quant_method": "modelopt", **found}}


def quant_method(config: Mapping[str, Any], where: str) -> str | None:
    """How config.json says that weights are quantized, None where they aren't. Raises UnsupportedInput for what can't be read."""
    given = quantization(config)
    if not given:
        return None
    method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
    if method not in QUANT_METHODS:
        raise UnsupportedInput(
            f"{where}: the weights are quantized ({method}); convert an unquantized copy of the model, "
            f"or one quantized as {' or '.join(QUANT_METHODS)}"
        )
    return str(method)


_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""What transformers 5 says in rope_parameters instead."""
_ROPE_BESIDE = ("rope_parameters", "original_max_position_embeddings")
"""What of the same may stand elsewhere in a file, and would contradict these where they are other than before."""


def updated(given: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A model's own config.json, key by key, with what is otherwise now.

    before, now: the file as we write it of the model that it describes, and of the one there is.
    """
    changes = {key: value for key, value in now.items() if key not in before or before[key] != value}
    dtype = changes.pop("torch_dtype", None)
    merged = {**given, **changes, **({} if dtype is None else {"dtype" if "dtype" in given else "torch_dtype": dtype})}
    merged.setdefault("architectures", now["architectures"])
    merged.pop(QUANTIZATION, None)  # what was quantized no longer is
    if changes.keys() & set(_ROPE):
        merged = {key: value for key, value in merged.items() if key in now or key not in _ROPE_BESIDE}
        merged |= {key: now[key] for key in _ROPE if key in now and (key in merged or now[key] is not None)}
    return merged


def as_file(config: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a character, which JSON can spell and UTF-8 can't
        return (json.dumps(config, indent=2) + "\n").encode()
