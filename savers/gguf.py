"""GGUF for llama.cpp: one file with weights, the model's sizes and its tokenizer, of the architectures that are checked."""

from math import pi

import numpy as np

from formats.gguf import BLOCK, KINDS, GgufLayout, Value
from formats.tensor import Shape, matrix_shape
from megaconv.engine.gguf_tokenizer import tokenizer_values
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.engine.stored_forms import Form, stored_shape
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.families.parts.gguf_names import ARCHITECTURES, gguf_rows
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, TensorInfo, main_dtype
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import GGUF
from megaconv.model.natives import NativeTensor, native_tensors
from megaconv.options import SaveOptions

DESCRIPTION = "GGUF for llama.cpp: model.gguf in F32, F16, BF16 or Q8_0"

OPTIONS = {
    "gguf_type": "what matrices are stored as: f32, f16, bf16 or q8_0; the model's own dtype by default",
    "tokenizer_pre": "llama.cpp's name for how a byte-level tokenizer splits text, where it isn't recognised: llama-bpe, qwen2 ...",
    "tokenizer": "none: leave the tokenizer out",
}
FILE = "model.gguf"
_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "q8_0"}
_ALWAYS_F32 = ("ffn_gate_inp.weight", "position_embd.weight")
_ROPE_FREQS = "rope_freqs.weight"


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that choose something."""
    return ()


def forms(header: Header, options: SaveOptions) -> dict[Key, Form]:
    """How each tensor is stored. Raises UsageError for a type that is not known, NotExpressible for another family."""
    wanted = options.extra.get("gguf_type")
    kind = _TYPES.get(wanted or "", "") if wanted is not None else main_dtype(header.manifest)
    if kind not in KINDS:
        raise UsageError(f"--option gguf_type={wanted or kind}: is not known; choose one of {', '.join(_TYPES)}")
    zero_centered = header.config.norm.zero_centered
    found: dict[Key, Form] = {}
    for native in _natives(header.config):
        for name in native.parts:
            shape = header.manifest[Key(name)].shape
            stored = kind
            if len(shape) == 1 or native.name.endswith(_ALWAYS_F32):
                stored = "float32"
            elif kind == "q8_0" and matrix_shape(shape)[1] % BLOCK:
                stored = "float16"
            is_norm = native.name.endswith("_norm.weight")
            found[Key(name)] = Form(stored, 1 if is_norm and zero_centered else 0)
    return found


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """header: of tensors in the form that forms() says. Raises NotExpressible for what llama.cpp has no place for."""
    config = header.config
    table = _family(config)
    tensors: dict[str, tuple[Shape, str]] = {}
    constants: dict[str, bytes] = {}
    if (divisors := _rope_divisors(config)) is not None:
        constants[_ROPE_FREQS] = divisors
        tensors[_ROPE_FREQS] = ((len(divisors) // 4,), "float32")
    placements: dict[Key, list[Placement]] = {}
    natives = _natives(config)
    for native in natives:
        info = header.manifest[Key(next(iter(native.parts)))]
        quantized = info.dtype == "uint8"
        tensors[native.name] = (native.shape, "q8_0" if quantized else info.dtype)
        row_bytes = _row_bytes(native, info)
        for name, regions in native.parts.items():
            cols = matrix_shape(header.manifest[Key(name)].shape)[1]
            moved = [region._replace(box=region.box._replace(col0=0, col1=cols)) for region in regions]
            placements.setdefault(Key(name), []).append(Placement(FILE, native.name, row_bytes, moved))
    kinds = [kind for shape, kind in tensors.values() if len(shape) > 1]
    main = max(set(kinds), key=kinds.count)
    values = _sizes(config, ARCHITECTURES[table.name], KINDS[main].file_type) | tokenizer_values(
        header.files, config, options.extra
    )
    lossy = f"matrices are stored as {main}, norms and biases as float32"
    return OutputPlan({FILE: GgufLayout(values, tensors, constants)}, placements, notices=(lossy,))


def _row_bytes(native: NativeTensor, info: TensorInfo) -> int:
    if info.dtype == "uint8":
        return stored_shape(native.shape, Form("q8_0"))[1]
    return matrix_shape(native.shape)[1] * {"float32": 4}.get(info.dtype, 2)


def _family(config: ModelConfig) -> Family:
    if config.family not in ARCHITECTURES:
        raise NotExpressible(
            f"--saver gguf: {config.family} is not supported; supported are {', '.join(ARCHITECTURES)}. Any other goes by way of "
            "--saver hf and llama.cpp's own converter"
        )
    return family(config.family)


def _natives(config: ModelConfig) -> list[NativeTensor]:
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    found = native_tensors(gguf_rows(_family(config)), config, GGUF, Layout(), 0, whole, config.vocab)
    return [native for native in found if native.copy is None]


def _sizes(config: ModelConfig, architecture: str, file_type: int) -> dict[str, Value]:
    """What llama.cpp builds the model by."""
    _require_expressible(config)
    attention, is_llama = config.attention, architecture == "llama"
    own_heads = "head_dim" in (config.hf or {}) and (config.hf or {})["head_dim"] is not None
    epsilon = "layer_norm_epsilon" if config.norm.kind == "LayerNorm" else "layer_norm_rms_epsilon"
    experts = config.experts
    sizes: dict[str, Value] = {
        "block_count": Value("u32", config.layer_count),
        "context_length": Value("u32", config.max_positions),
        "embedding_length": Value("u32", config.hidden),
        "feed_forward_length": Value("u32", config.mlp.ffn),
        "attention.head_count": Value("u32", attention.heads),
        f"attention.{epsilon}": Value("f32", config.norm.epsilon),
    }
    if architecture != "gpt2":
        sizes["attention.head_count_kv"] = Value("u32", attention.kv_heads)
    if architecture not in ("gpt2", "gemma"):
        sizes["rope.freq_base"] = Value("f32", config.positions.theta)
    if own_heads:
        sizes["attention.key_length"] = sizes["attention.value_length"] = Value("u32", attention.head_dim)
    if is_llama:
        sizes |= {"vocab_size": Value("u32", config.vocab), "rope.dimension_count": Value("u32", attention.head_dim)}
    if experts.count:
        sizes |= {"expert_count": Value("u32", experts.count), "expert_used_count": Value("u32", experts.per_token)}
        if not is_llama:
            sizes["expert_feed_forward_length"] = Value("u32", experts.ffn)
    general = {
        "general.architecture": Value("string", architecture),
        "general.type": Value("string", "model"),
        "general.file_type": Value("u32", file_type),
        "general.quantization_version": Value("u32", 2),
    }
    return general | {f"{architecture}.{name}": value for name, value in sizes.items()}


def _require_expressible(config: ModelConfig) -> None:
    scaling = config.positions.scaling
    if scaling is not None and scaling.get("rope_type") != "llama3":
        raise NotExpressible(
            f"--saver gguf: rope scaling {scaling.get('rope_type')!r} is not supported; only llama3 is"
        )
    if config.window is not None and config.window < config.max_positions:
        raise NotExpressible(f"--saver gguf: a window of {config.window:,} positions is not supported")
    if config.experts.count and (not config.experts.renormalize or config.has("dense", 0)):
        raise NotExpressible(
            "--saver gguf: this mixture of experts is not supported: every layer has one, whose weights sum up to 1"
        )


def _rope_divisors(config: ModelConfig) -> bytes | None:
    """By how much llama3's scaling slows each frequency down, in float32 as its arithmetic; None where positions aren't scaled so."""
    scaling = config.positions.scaling or {}
    if scaling.get("rope_type") != "llama3":
        return None
    one, dim = np.float32(1), config.attention.head_dim
    factor, old, low, high = (
        np.float32(scaling[key])
        for key in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    frequencies = one / np.float32(config.positions.theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    lengths = np.float32(2 * pi) / frequencies
    smooth = (old / lengths - low) / (high - low)
    between = one / ((one - smooth) / factor + smooth)
    return np.where(lengths < old / high, one, np.where(lengths > old / low, factor, between)).tobytes()
