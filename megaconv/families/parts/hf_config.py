"""A config.json as a file: read, checked for quantized weights, and written again with the model's own words where they are known."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.words import CONFIG_NAME
from megaconv.model.config import ModelConfig

QUANT_METHODS = ("fp8", "mxfp4")
"""quant_method of config.json."""


def load_config(path: Path) -> dict[str, Any]:
    """Raises CorruptCheckpoint when the file is not a JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptCheckpoint(
            f"{path}: no such file; a Hugging Face model directory has a {CONFIG_NAME}", code="missing-file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def quant_method(config: Mapping[str, Any], where: str) -> str | None:
    """How config.json says that weights are quantized, None where they aren't. Raises NotExpressible for what can't be read."""
    said = config.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method", "unknown") if isinstance(said, Mapping) else said
    if method not in QUANT_METHODS:
        raise NotExpressible(
            f"{where}: the weights are quantized ({method}); convert an unquantized copy of the model, "
            f"or one quantized as {' or '.join(QUANT_METHODS)}"
        )
    return str(method)


def config_json(config: ModelConfig, written: Mapping[str, Any]) -> bytes:
    """The config.json to ship: the model's own words where we have them, with the dtype that the tensors now have."""
    merged = dict(written)
    if config.hf is not None:
        merged = dict(config.hf)
        key = "dtype" if "dtype" in merged else "torch_dtype"
        merged |= {key: config.dtype, "vocab_size": config.vocab}
        merged.setdefault("architectures", written["architectures"])
        merged.pop("quantization_config", None)  # what was quantized no longer is
    return (json.dumps(merged, indent=2, ensure_ascii=False) + "\n").encode()
