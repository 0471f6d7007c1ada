"""MLX for mlx-lm: config.json, tokenizer files and sharded safetensors, plain or quantized as `mlx_lm.convert -q` does."""

import json
from typing import Any

from formats.output import FileLayout, PlainFile
from formats.wording import counted
from megaconv.engine.plan import OutputPlan, Placement, add_placements, native_dtype
from megaconv.engine.sidecars import small_files
from megaconv.engine.weight_files import add_weight_files
from megaconv.errors import NotExpressible
from megaconv.families import Family, family
from megaconv.families.parts.hf_config import as_file
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.mlx.config import completed
from megaconv.mlx.limits import differences, require_within
from megaconv.mlx.names import (
    INSIDE,
    WRITTEN,
    mlx_rows,
    wrapper_of,
)
from megaconv.mlx.quantization import OPTIONS, quantization_of, quantized_forms, with_scales
from megaconv.mlx.settings import FLOATS, KEYS
from megaconv.mlx.tensors import as_in_mlx, is_shifted
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Key
from megaconv.model.naming import MLX
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.options import SaveOptions
from megaconv.saver import Saver
from megaconv.values.forms import LEFT_OUT, PLUS_ONE, Form

_METADATA = {"format": "mlx"}


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("max_shard_bytes",)


def forms(header: Header, options: SaveOptions) -> dict[Key, Form]:
    """The form of each tensor that is stored otherwise. Raises UsageError, and NotExpressible for another family."""
    quantization = quantization_of(options.extra)
    natives = _natives(header.config)
    require_within(header.config)
    _require_floats(header)
    found = {} if quantization is None else quantized_forms(natives, quantization)
    name = header.config.family
    shifted = [native for native in natives if is_shifted(name, native.name)]
    found |= {Key(part): Form(PLUS_ONE) for native in shifted for part in native.parts}
    predicting = (key for key in header.manifest if key.name.startswith("mtp."))
    return found | dict.fromkeys(predicting, Form(LEFT_OUT))


def _require_floats(header: Header) -> None:
    """Raise NotExpressible for other dtypes. mlx reads the codes of 8-bit floats as whole numbers, and no float64."""
    for key, info in header.manifest.items():
        if info.dtype not in FLOATS:
            remedy = "; add --dtype bf16" if info.dtype == "float64" else ""
            raise NotExpressible(
                f"--saver mlx: {key.name} is {info.dtype}; mlx-lm computes with {', '.join(FLOATS)}{remedy}"
            )


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises NotExpressible if the family has no config.json for this model.

    header: describes tensors in the form that forms() returns.
    """
    stored = [each for native in _natives(header.config) for each in with_scales(native, header)]
    prefix = INSIDE if wrapper_of(header.config.family) else ""
    tensors = [
        (prefix + native.name, as_in_mlx(native.name, native.shape), native_dtype(header, native))
        for native in stored
    ]
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(_config_json(header, options))}
    files |= small_files(header)
    file_of = add_weight_files(files, tensors, options.max_shard_bytes, metadata=_METADATA)
    placements: dict[Key, list[Placement]] = {}
    for native in stored:
        record = prefix + native.name
        add_placements(placements, header, native, file_of[record], record)
    return OutputPlan(files, placements, notices=_notices(header, options))


def _config_json(header: Header, options: SaveOptions) -> bytes:
    """The model's own config.json, completed by the keys that mlx-lm expects, with MLX's quantization."""
    config = changed(header.config, {"mtp_layers": 0})
    table = family(config.family)
    own: dict[str, Any] = json.loads(table.config_json(config, header.training.arguments))
    raw = completed({**table.write_hf(config), **own}, config)
    wrapper = wrapper_of(config.family)
    if wrapper is not None:
        raw = {**wrapper, "tie_word_embeddings": config.tie_embeddings, "text_config": raw}
    quantization = quantization_of(options.extra)
    if quantization is not None:
        raw |= dict.fromkeys(KEYS, quantization.settings)
    return as_file(raw)


def _notices(header: Header, options: SaveOptions) -> list[str]:
    found = list(differences(header.config))
    quantization = quantization_of(options.extra)
    if quantization is not None:
        found.append(
            f"weights of linear layers and embeddings are rounded to {quantization.description}; fingerprints are of the values that are "
            "read back"
        )
    if header.config.mtp_layers:
        found.append(
            f"{counted(header.config.mtp_layers, 'MTP layer')} left out: mlx-lm has none; outputs don't change"
        )
    return found


def _family(config: ModelConfig) -> Family:
    if config.family == "gpt_oss":
        raise NotExpressible(
            "--saver mlx: gpt_oss is read by mlx-lm in OpenAI's own form; use --saver hf --quantize mxfp4"
        )
    if config.family not in WRITTEN:
        raise NotExpressible(
            f"--saver mlx: {config.family} is not supported; docs/mlx.md lists the families that are. For any other family, use "
            "--saver hf and then mlx_lm.convert"
        )
    return family(config.family)


def _natives(config: ModelConfig) -> list[NativeTensor]:
    config = changed(config, {"mtp_layers": 0})
    found = unsharded_tensors(mlx_rows(_family(config)), config, MLX)
    return [native for native in found if native.copy is None]


SAVER = Saver(
    name="mlx",
    description="MLX for mlx-lm: sharded *.safetensors, plain or quantized to integers or floats of 2 to 8 bits",
    plan=plan,
    options=OPTIONS,
    uses=uses,
    forms=forms,
    reads_back=True,
)
