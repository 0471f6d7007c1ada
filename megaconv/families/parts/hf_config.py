"""A config.json as a file: reads it, checks it for quantized weights and for encoders, and writes it again with the model's own keys."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.regular_files import read_json
from megaconv.errors import CheckpointError, CorruptCheckpoint, UnknownFamily, UnsupportedInput
from megaconv.families.parts.keys import CONFIG_NAME, Keys

MLX = "mlx"
QUANT_METHODS = (
    *(
        "fp8",
        "fbgemm_fp8",
        "mxfp4",
        "modelopt",
        "compressed-tensors",
        "gptq",
        "awq",
        "bitsandbytes",
    ),
    MLX,
)
"""Supported values of quant_method in config.json. MLX's description names no method."""


def load_config(path: Path) -> dict[str, Any]:
    """The content of a config.json. Raises CorruptCheckpoint if it isn't a JSON object, or names no class properly."""
    if not path.exists():
        raise CorruptCheckpoint(
            f"{path}: no such file; a Hugging Face model directory has a {CONFIG_NAME}",
            code="missing-file",
        )
    config = read_json(path, CONFIG_BYTES)
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found {type(config).__name__}")
    _require_names(config, path)
    return config


def _require_names(config: Mapping[str, Any], path: Path) -> None:
    """Raise CorruptCheckpoint if the names of the class and of the kind of model aren't text."""
    classes, kind = config.get("architectures"), config.get("model_type")
    are_names = isinstance(classes or [], list) and all(
        isinstance(name, str) for name in classes or []
    )
    if not are_names:
        raise CorruptCheckpoint(
            f"{path}: architectures should be a list of class names, found {classes!r:.60}"
        )
    if not isinstance(kind or "", str):
        raise CorruptCheckpoint(f"{path}: model_type should be a name, found {kind!r:.60}")


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Errors that begin with `config.json`, by which families know the file, with `the model` or with `the checkpoint`
    begin with its path.

    path: the file, or the directory of a Megatron checkpoint.
    """
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(f"{CONFIG_NAME}: "):
            error.args = (f"{path}{str(error).removeprefix(CONFIG_NAME)}",)
        elif str(error).startswith(("the model", "the checkpoint")):
            error.args = (f"{path}: {error}",)
        raise


QUANTIZATION, _QUANTIZATION_OF_MLX = "quantization_config", "quantization"


def quantization(config: Mapping[str, Any]) -> Any:
    """The quantization_config of a config.json: of the whole model, or (Kimi K2.5) of the language model inside; None
    if there is none. MLX has the key `quantization` for it, sometimes both."""
    inside = config.get("text_config")
    given = config.get(QUANTIZATION) or (
        inside.get(QUANTIZATION) if isinstance(inside, Mapping) else None
    )
    of_mlx = config.get(_QUANTIZATION_OF_MLX)
    return of_mlx if not given and is_of_mlx(of_mlx) else given


def is_of_mlx(given: Any) -> bool:
    """True for MLX's description of quantized weights, which names no method."""
    has_keys = isinstance(given, Mapping) and {"bits", "group_size"} <= given.keys()
    return has_keys and "quant_method" not in given


_EXPERT_DTYPE = "expert_dtype"
"""The dtype of a DeepSeek V4's quantized experts."""
MODELOPT_FILE = "hf_quant_config.json"


def with_modelopt_file(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """A config.json, completed by ModelOpt's own file if it doesn't describe the quantization itself. Raises
    CorruptCheckpoint."""
    if quantization(config) or not (directory / MODELOPT_FILE).is_file():
        return config
    found = load_config(directory / MODELOPT_FILE).get("quantization")
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{directory / MODELOPT_FILE}: has no `quantization`")
    return {**config, QUANTIZATION: {"quant_method": "modelopt", **found}}


def quant_method(config: Mapping[str, Any], where: str) -> str | None:
    """The method by which the weights are quantized; None if they are not. Raises UnsupportedInput for an unsupported
    method."""
    given = quantization(config)
    if not given:
        return None
    unnamed = MLX if is_of_mlx(given) else "unknown"
    method = given.get("quant_method", unnamed) if isinstance(given, Mapping) else given
    if method not in QUANT_METHODS:
        raise UnsupportedInput(
            f"{where}: the weights are quantized ({method}); convert an unquantized copy of the model, "
            f"or one quantized as {' or '.join(QUANT_METHODS)}"
        )
    return str(method)


def require_causal(config: Mapping[str, Any], where: str) -> None:
    """Raise UnknownFamily if each token attends to the later ones too. transformers 5 reads the key in all decoders."""
    if not config.get("is_causal", True):
        raise UnknownFamily(
            f"{where}: is_causal {config['is_causal']!r:.40} makes an encoder of the model; only decoders are supported"
        )


_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Keys whose content transformers 5 stores in rope_parameters."""
_ROPE_BESIDE = ("rope_parameters", "original_max_position_embeddings")
"""Keys that hold the same content elsewhere in a file. They would contradict the keys in _ROPE after a change."""


def updated(
    given: Mapping[str, Any],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    aliases: Mapping[str, str],
    groups: Iterable[Keys] = (),
) -> dict[str, Any]:
    """A model's own config.json with the changed keys.

    before: config.json as megaconv writes it for the model that `given` describes. now: the same for the current model.
    aliases: second name -> key. A second name stays only if its value is unchanged.
    groups: keys that describe one thing. If one of them changes, the others get the values of `now`. Those that `now` lacks stay
    only if they still describe the model, such as the length of a pattern of layers: some programs read no other key.
    """
    changes = {
        key: value for key, value in now.items() if key not in before or before[key] != value
    }
    dtype = changes.pop("torch_dtype", None)
    for group in groups:
        replaced = changes.keys() & set(group.names)
        if replaced:
            changes |= {key: now[key] for key in group.names if key in now and key in given}
            others = set(group.names) - now.keys()
            if not others.isdisjoint(given) and not _describe(group, replaced, given, now):
                given = {key: value for key, value in given.items() if key not in others}
    given = {name: value for name, value in given.items() if aliases.get(name) not in changes}
    merged = {**given, **changes}
    if dtype is not None:
        stated = [key for key in ("dtype", "torch_dtype") if key in given]
        merged |= dict.fromkeys(stated or ["torch_dtype"], dtype)
    merged.setdefault("architectures", now["architectures"])
    for key in (QUANTIZATION, _QUANTIZATION_OF_MLX, _EXPERT_DTYPE):
        merged.pop(key, None)  # the weights are no longer quantized
    if changes.keys() & set(_ROPE):
        merged = {
            key: value for key, value in merged.items() if key in now or key not in _ROPE_BESIDE
        }
        for key in _ROPE:
            if key in now and (key in merged or now[key] is not None):
                merged[key] = now[key]
    return merged


def _describe(
    group: Keys, replaced: Collection[str], given: Mapping[str, Any], now: Mapping[str, Any]
) -> bool:
    """True if the keys of `given` say without the replaced ones of the group what `now` says."""
    others = {key: value for key, value in {**given, **now}.items() if key not in replaced}
    try:
        return group.read(others) == group.read(now)
    except CheckpointError:
        return False


def as_file(config: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can represent and UTF-8 can't
        return (json.dumps(config, indent=2) + "\n").encode()
