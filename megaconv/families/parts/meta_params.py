"""params.json: the description of a model in Meta's and Mistral's own files.

    {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.3,
     "multiple_of": 1024, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": true}             (Meta: Llama 3.1)
    {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
     "norm_eps": 1e-05, "vocab_size": 32000, "sliding_window": 4096}                                    (Mistral: 7B v0.1)

A Mixtral also has `"moe": {"num_experts": 8, "num_experts_per_tok": 2}`. Both files lack token ids. Meta's file also
lacks the number of positions and the scaling of rope. The assumed values are:

    Llama 1     2048 positions                               bos 1, eos 2
    Llama 2     4096 (with n_kv_heads, or a norm_eps of 1e-5 below dim 8192); 16384 with a rope_theta above 10000
    Llama 3     8192 (vocabulary over 100000, or rope_theta 500000); bos 128000, eos 128001
    scaled      131072, by `llama3` scaling from 8192 with factors 1 and 4, times rope_scaling_factor; if that is
                missing, times 8, or times 32 if the head is tied (Llama 3.2)
    Mistral     max_seq_len or max_position_embeddings if one is present, else 32768     bos 1, eos 2

Sources: ModelArgs in meta-llama's llama, llama3 and llama-models; TransformerArgs in mistral-inference; the converters
of these formats in transformers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.errors import CorruptCheckpoint, NotExpressible, UnsupportedInput, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED, from_fields
from megaconv.model.meaning import require_kept

PARAMS_NAME = "params.json"
KINDS = {"meta": "Meta's", "mistral": "Mistral's"}
"""Value of --checkpoint-type -> owner of the format, for people."""

_UNKNOWN = {
    "quantization_args": "quantized weights", "quantization": "quantized weights", "lora_args": "LoRA weights", "lora": "LoRA weights",
    "vision_chunk_size": "an image encoder", "vision_model": "an image encoder", "vision_encoder": "an image encoder",
    "moe_args": "experts", "yarn": "yarn rope scaling", "llama_4_scaling": "scaled attention",
}  # fmt: skip
_OF_BOTH = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "norm_eps",
    "rope_theta",
    "head_dim",
    "max_seq_len",
}
_READ = {
    "meta": _OF_BOTH | {"use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor"},
    "mistral": _OF_BOTH | {"hidden_dim", "moe", "sliding_window", "max_position_embeddings"},
}
"""Keys that give the model's configuration, by --checkpoint-type."""
_HARMLESS = frozenset((
    # The tensors show these: the width of the MLP, the vocabulary, and whether the head is the embedding.
    *("multiple_of", "ffn_dim_multiplier", "vocab_size", "tied_embeddings", "hidden_dim"),
    # Settings of a running program, and of encoders whose own key is refused.
    *("max_batch_size", "model_parallel_size", "use_kvq", "dtype", "vision_max_num_chunks", "vision_num_cross_attention_layers"),
))  # fmt: skip
_NEUTRAL: Mapping[str, Any] = {"causal": True, "activation": "silu", "model_type": "transformer"}
"""Key -> the only value that these models have, besides null. For other keys, false and -1 are like null."""
_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants in Meta's code."""
_PUBLISHED = ((256, None), (256, 1.5), (4096, 1.3), (1024, 1.3))
"""(multiple_of, ffn_dim_multiplier) of Llama 1 and 2; of Llama 3.2 1B; of 70B; of Llama 3 8B."""


def load_params(path: Path) -> dict[str, Any]:
    """The content of params.json. Raises CorruptCheckpoint if it is not a JSON object, and UnsupportedInput unless it
    is a plain decoder."""
    params = read_json(path, CONFIG_BYTES)
    params = params.get("model", params) if isinstance(params, dict) else params
    if not isinstance(params, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found {type(params).__name__}")
    for name, what in _UNKNOWN.items():
        if params.get(name) not in (None, -1):
            raise UnsupportedInput(
                f"{path}: the model has {what} ({name}), which can't be read from these files"
            )
    return params


def require_read(params: Mapping[str, Any], kind: str, path: Path) -> None:
    """Raise UsageError, which names path, for a key that is not read and may change what the model computes."""
    for name, value in params.items():
        is_known = name in _READ[kind] or name in _HARMLESS
        neutral = (_NEUTRAL[name], None) if name in _NEUTRAL else (None, False, -1)
        if is_known or value in neutral:
            continue
        raise UsageError(
            f"{path}: says {name} = {value!r:.60}, which is not read here and may change what the model computes; "
            "give --config with the Hugging Face directory of the model",
            code="config-needed",
        )


def kind_of(params: Mapping[str, Any]) -> str:
    """`mistral` if the file gives the width of the MLP, as Meta's never does; else `meta`."""
    return "mistral" if "hidden_dim" in params else "meta"


def read_params(
    params: Mapping[str, Any], kind: str, found: Mapping[str, Any], path: Path
) -> ModelConfig:
    """The model that params.json describes.

    found: fields of the configuration that the tensors show: vocab, mlp.ffn, tie_embeddings. Mistral's params contain
    ffn themselves.
    Raises CorruptCheckpoint, which names path, for impossible values.
    """
    try:
        config = (_read_mistral if kind == "mistral" else _read_meta)(params, found)
        if config.attention.head_dim % 2 or config.attention.heads % config.attention.kv_heads:
            raise ValueError(
                f"{config.attention.heads} heads of {config.attention.head_dim} with {config.attention.kv_heads} key/value heads; "
                "expected heads of an even size, and a number of them that the key/value heads divide"
            )
    except (CorruptCheckpoint, TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise CorruptCheckpoint(
            f"{path}: is not the description of a model of {KINDS[kind]}: {what}"
        ) from error
    return config


def _read_meta(params: Mapping[str, Any], found: Mapping[str, Any]) -> ModelConfig:
    llama3 = (
        found["vocab"] > 100_000
        or params.get("rope_theta") == 500_000
        or bool(params.get("use_scaled_rope"))
    )
    theta = params.get("rope_theta", 500_000.0 if llama3 else 10_000.0)
    scaling: dict[str, Any] | None = None
    if params.get("use_scaled_rope"):
        factor = params.get("rope_scaling_factor") or (32 if found["tie_embeddings"] else 8)
        scaling = {"rope_type": "llama3", "factor": float(factor), **_SCALING}
        scaling["high_freq_factor"] = float(
            params.get("rope_high_freq_factor") or scaling["high_freq_factor"]
        )
    positions = 8192 if llama3 else _positions_before_3(params, theta)
    if scaling:
        positions = 131_072
    bos, eos = (128_000, 128_001) if llama3 else (1, 2)
    return from_fields(
        "llama",
        _read_common(params, found)
        | {
            "attention.head_dim": params.get("head_dim") or _per_head(params),
            "mlp.ffn": found["mlp.ffn"],
            "positions.theta": float(theta),
            "positions.scaling": scaling,
            "max_positions": params.get("max_seq_len") or positions,
            "bos_token_id": bos if found["vocab"] > eos else None,
            "eos_token_id": eos if found["vocab"] > eos else None,
        },
    )


def _positions_before_3(params: Mapping[str, Any], theta: float) -> int:
    if theta > 10_000:
        return 16_384
    if "n_kv_heads" in params:
        return 4096
    # Llama 2 has a larger epsilon than Llama 1. In the largest models, n_kv_heads is the only difference.
    has_epsilon_of_2 = params.get("norm_eps", 0) >= 1e-5
    return 4096 if has_epsilon_of_2 and params["dim"] < 8192 else 2048


def _read_mistral(params: Mapping[str, Any], found: Mapping[str, Any]) -> ModelConfig:
    window, moe = params.get("sliding_window"), params.get("moe")
    experts = {}
    if moe:
        experts = {
            "experts.count": moe["num_experts"],
            "experts.per_token": moe["num_experts_per_tok"],
        }
        experts |= {"experts.ffn": params["hidden_dim"], "layers.mlp": "experts"}
    return from_fields(
        "mixtral" if moe else "mistral",
        _read_common(params, found)
        | experts
        | {
            "attention.head_dim": params.get("head_dim") or _per_head(params),
            "mlp.ffn": params["hidden_dim"],
            "positions.theta": float(params.get("rope_theta") or 10_000.0),
            "max_positions": _positions_of_mistral(params),
            "layers.window": None if window is None else int(window),
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    )


def _positions_of_mistral(params: Mapping[str, Any]) -> Any:
    return params.get("max_seq_len") or params.get("max_position_embeddings") or 32_768


def _read_common(params: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    heads = params["n_heads"]
    return {
        "layers.count": params["n_layers"],
        "hidden": params["dim"],
        "attention.heads": heads,
        "attention.kv_heads": params.get("n_kv_heads") or heads,
        "vocab": found["vocab"],
        "norm.epsilon": params.get("norm_eps", 1e-5),
        "tie_embeddings": found["tie_embeddings"],
    }


def _per_head(params: Mapping[str, Any]) -> int:
    dim, heads = params["dim"], params["n_heads"]
    if type(dim) is not int or type(heads) is not int or dim < 1 or heads < 1 or dim % heads:
        raise ValueError(f"dim = {dim!r} can't be divided over n_heads = {heads!r}")
    return dim // heads


# Writing.


def is_llama3(config: ModelConfig) -> bool:
    """True if Meta's code for Llama 3 reads the model. That code shards the embedding by rows, like the head."""
    return config.vocab > 100_000 or config.positions.theta == 500_000 or _is_scaled_by_meta(config)


def write_params(config: ModelConfig, kind: str, *, allow_lossy: bool) -> dict[str, Any]:
    """The params.json of a model. Raises NotExpressible.

    allow_lossy: leave out a rope scaling that params.json can't represent.
    """
    if config.has("encoder") or config.has("transform"):
        raise NotExpressible(
            f"the model has an encoder, which {KINDS[kind]} {PARAMS_NAME} can't represent"
        )
    written = _write(config, kind)
    found = {
        "vocab": config.vocab,
        "mlp.ffn": config.mlp.ffn,
        "tie_embeddings": config.tie_embeddings,
    }
    try:
        back = read_params(written, kind, found, Path(PARAMS_NAME))
    except CorruptCheckpoint as error:
        raise NotExpressible(f"the model can't be represented in {KINDS[kind]} {error}") from error
    assumed = [*NOT_COMPUTED, "max_positions"]
    if allow_lossy:
        assumed.append("positions.scaling")
    require_kept(config, back, f"{KINDS[kind]} {PARAMS_NAME}", but=assumed)
    return written


def _write(config: ModelConfig, kind: str) -> dict[str, Any]:
    common = {
        "dim": config.hidden,
        "n_layers": config.layer_count,
        "n_heads": config.attention.heads,
    }
    sizes = {"norm_eps": config.norm.epsilon, "vocab_size": config.vocab}
    if kind == "mistral":
        window = {} if config.window is None else {"sliding_window": config.window}
        own: dict[str, Any] = {
            "head_dim": config.attention.head_dim,
            "hidden_dim": config.mlp.ffn,
            "n_kv_heads": config.attention.kv_heads,
        }
        if config.experts.count:
            own |= {"hidden_dim": config.experts.ffn}
            own["moe"] = {
                "num_experts": config.experts.count,
                "num_experts_per_tok": config.experts.per_token,
            }
        return (
            common
            | own
            | sizes
            | {"rope_theta": config.positions.theta, "max_seq_len": config.max_positions}
            | window
        )
    params: dict[str, Any] = common | sizes
    if config.attention.kv_heads != config.attention.heads:
        params["n_kv_heads"] = config.attention.kv_heads
    params |= _ffn_keys(config.hidden, config.mlp.ffn)
    if config.positions.theta != 10_000 or is_llama3(config):
        params["rope_theta"] = config.positions.theta
    if _is_scaled_by_meta(config):
        assert config.positions.scaling is not None
        params["use_scaled_rope"] = True
        if config.positions.scaling["factor"] != 8 or config.tie_embeddings:
            params["rope_scaling_factor"] = config.positions.scaling["factor"]
    return params


def params_json(config: ModelConfig, kind: str, *, allow_lossy: bool) -> bytes:
    """The content of the file. Raises as write_params does."""
    return (json.dumps(write_params(config, kind, allow_lossy=allow_lossy)) + "\n").encode()


def _is_scaled_by_meta(config: ModelConfig) -> bool:
    scaling = config.positions.scaling or {}
    return scaling.get("rope_type") == "llama3" and all(
        scaling[name] == value for name, value in _SCALING.items()
    )


def _ffn_keys(dim: int, ffn: int) -> dict[str, Any]:
    """multiple_of and, if necessary, ffn_dim_multiplier that give this width. Published values are preferred."""
    multiple = math.gcd(ffn, 4096)
    base = ffn_width(dim, 1, None)
    # The multiplier needs less precision if multiple_of is larger: take the fewest digits that give this width.
    close = [(multiple, round((ffn - multiple / 2) / base, digits)) for digits in range(1, 18)]
    for multiple_of, multiplier in (
        *_PUBLISHED,
        (multiple, None),
        *close,
        (1, ffn / base),
        (1, (ffn + 0.5) / base),
    ):
        if ffn_width(dim, multiple_of, multiplier) == ffn:
            found: dict[str, Any] = {"multiple_of": multiple_of}
            return found if multiplier is None else found | {"ffn_dim_multiplier": multiplier}
    raise NotExpressible(
        f"the model has an MLP of width {ffn}, which no ffn_dim_multiplier gives for dim {dim}"
    )


def ffn_width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """The width of the MLP, as Meta's code computes it."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)
