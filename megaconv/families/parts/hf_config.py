"""Hugging Face's config.json: the words that families share, as transformers 4 and 5 each write them.

transformers 4 writes rope_theta, rope_scaling and torch_dtype; transformers 5 writes rope_parameters and dtype.
We read both, and write the older words, which both versions understand.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.errors import CorruptCheckpoint, NotExpressible, UnknownFamily
from megaconv.model.config import ModelConfig

CONFIG_NAME = "config.json"

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALING = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3}
"""What each kind of rope scaling needs."""

QUANT_METHODS = ("fp8", "mxfp4")
"""quant_method of config.json."""


def load_config(path: Path) -> dict[str, Any]:
    """Raises CorruptCheckpoint when the file is not a JSON object."""
    if not path.exists():
        raise CorruptCheckpoint(f"{path}: no such file; a Hugging Face model directory has a {CONFIG_NAME}")
    config = read_json(path, CONFIG_BYTES)
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def read_decoder(raw: Mapping[str, Any], family: str, defaults: Mapping[str, Any], **features: Any) -> ModelConfig:
    """What the Llama-like architectures say in the same words.

    defaults: transformers' own defaults of this architecture for keys that may be left out; as `activations` the words for
    the one activation that it has. features: fields of ModelConfig that the family decides itself; they win over those
    read here.
    """
    _refuse_unsupported(raw, defaults.get("activations", ("silu", "swish")))
    if "rotary_percent" not in features and rotary_percent(raw, 1.0) != 1.0:
        raise NotExpressible(
            f"{CONFIG_NAME}: partial_rotary_factor {rotary_percent(raw, 1.0)} is not known in this architecture"
        )
    hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    said = {"num_key_value_heads": defaults.get("num_key_value_heads"), **raw}
    kv_heads = heads if said["num_key_value_heads"] is None else _size(said, "num_key_value_heads")
    if heads % kv_heads:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_key_value_heads {kv_heads} doesn't divide num_attention_heads {heads}"
        )
    head_dim = raw.get("head_dim") or defaults.get("head_dim") or hidden // heads
    theta, scaling = _rope(raw, defaults.get("rope_theta", 10000.0))
    tokens, tied = {name: defaults.get(name) for name in _TOKENS}, bool(defaults.get("tie_word_embeddings"))
    read = {
        "layers": _size(raw, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": _size(raw, "intermediate_size"),
        "max_positions": raw.get("max_position_embeddings") or defaults["max_position_embeddings"],
        "norm_epsilon": _number(raw, "rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    common = read_hf_common(tokens | dict(raw), tied=tied) | {"hf": dict(raw)}
    return ModelConfig(family=family, **read | common | features)


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_hf_common(raw: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """What all architectures say in the same words, as fields of ModelConfig; tied: whether the head is, unless told."""
    eos = raw.get("eos_token_id")
    return {
        "vocab": _size(raw, "vocab_size"),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", tied)),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_token_id": raw.get("pad_token_id"),
        "hf": dict(raw),
    }


def rotary_percent(raw: Mapping[str, Any], default: float) -> float:
    """The part of each head that rotates, in either transformers' words."""
    found = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    return float(default if found is None else found)


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a positive number, found {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if type(value) not in (int, float):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be a number, found {value!r}")
    return float(value)


def _refuse_unsupported(raw: Mapping[str, Any], activations: tuple[str, ...]) -> None:
    if raw.get("hidden_act", activations[0]) not in activations:
        raise UnknownFamily(
            f"{CONFIG_NAME}: hidden_act {raw['hidden_act']!r} is not known in this architecture; expected {activations[0]}"
        )
    quant_method(raw, CONFIG_NAME)


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


def _rope(raw: Mapping[str, Any], default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None) from either transformers' words."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be an object, found {raw[key]!r}")
    parameters = dict(raw.get("rope_parameters") or {})
    scaling = dict(raw.get("rope_scaling") or {}) or parameters
    theta = _number({**raw, **parameters}, "rope_theta", default_theta)
    kind = scaling.pop("type", None)
    scaling["rope_type"] = scaling.get("rope_type") or kind or "default"
    scaling.pop("rope_theta", None)
    scaling.pop("partial_rotary_factor", None)
    for name in _SCALING.get(scaling["rope_type"], ()):
        if type(scaling.get(name)) not in (int, float):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: rope scaling {scaling['rope_type']} has no number {name}: {scaling}"
            )
    return theta, None if scaling["rope_type"] == "default" else scaling


def write_decoder(config: ModelConfig, architecture: str, model_type: str, **features: Any) -> dict[str, Any]:
    """A config.json for a Llama-like architecture; features are the family's own keys."""
    eos = config.eos_token_id
    return {
        "architectures": [architecture],
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.max_positions,
        "model_type": model_type,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_epsilon,
        "rope_scaling": dict(config.rope_scaling) if config.rope_scaling else None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
        "vocab_size": config.vocab,
        **features,
    }


def refuse(config: ModelConfig, architecture: str, **features: str) -> None:
    """Raise NotExpressible for the first feature (field: description) that the model has and the architecture hasn't."""
    for name, description in features.items():
        if getattr(config, name):
            raise NotExpressible(
                f"the model has {description}, for which {architecture} has no place in its {CONFIG_NAME}"
            )


def layer_types(config: ModelConfig) -> list[str]:
    """transformers' word for each layer's attention."""
    windowed = range(config.layers) if config.windowed_layers is None else config.windowed_layers
    return [
        "sliding_attention" if config.sliding_window and layer in windowed else "full_attention"
        for layer in range(config.layers)
    ]


def windowed_layers(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layers with a sliding window, by layer_types or Qwen's max_window_layers; None where all layers have it."""
    layers = _size(raw, "num_hidden_layers")
    if raw.get("layer_types"):
        if len(raw["layer_types"]) != layers:
            listed = len(raw["layer_types"])
            raise CorruptCheckpoint(f"{CONFIG_NAME}: layer_types lists {listed} layers, the model has {layers}")
        found = tuple(index for index, kind in enumerate(raw["layer_types"]) if kind == "sliding_attention")
    else:
        found = tuple(range(raw.get("max_window_layers") or 0, layers))
    return None if len(found) == layers else found


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
