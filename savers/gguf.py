"""GGUF for llama.cpp: one file with weights, the model's sizes and its tokenizer, of the architectures that are checked."""

from math import pi

import numpy as np

from formats.gguf import BLOCK, KINDS, GgufLayout, Value
from formats.tensor import Shape, matrix_shape
from megaconv.engine.gguf_tokenizer import tokenizer_values
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.engine.stored_forms import LEFT_OUT, Form, stored_shape
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family
from megaconv.families.parts.gguf_names import ARCHITECTURES, gguf_rows
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
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
_LATENT = "deepseek2"
_SCORES = {"softmax": 1, "sigmoid": 2}
"""What turns a router's logits into weights -> llama.cpp's number of it."""
_ORIGINAL = "original_max_position_embeddings"
_YARN = {"rope_type", "factor", _ORIGINAL, "mscale", "mscale_all_dim", "beta_fast", "beta_slow"}


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
            elif kind == "q8_0" and (matrix_shape(shape)[1] % BLOCK or _is_transposed(native)):
                stored = "float16"
            is_norm = native.name.endswith("_norm.weight")
            found[Key(name)] = Form(stored, 1 if is_norm and zero_centered else 0)
    predicting = (key for key in header.manifest if key.name.startswith("mtp."))
    return found | dict.fromkeys(predicting, Form(LEFT_OUT))


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
    notices = [f"matrices are stored as {main}, norms and biases as float32"]
    if config.mtp_layers:
        notices.append(
            f"{config.mtp_layers} MTP layer(s) are left out: {ARCHITECTURES[table.name]} has none in llama.cpp; outputs don't change"
        )
    return OutputPlan({FILE: GgufLayout(values, tensors, constants)}, placements, notices=notices)


def _is_transposed(native: NativeTensor) -> bool:
    """Whether its rows are columns of canonical tensors, whose blocks of Q8_0 are of their own rows."""
    return any(region.transposed for regions in native.parts.values() for region in regions)


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
    config = changed(config, {"mtp_layers": 0})
    found = native_tensors(gguf_rows(_family(config)), config, GGUF, Layout(), 0, whole, config.vocab)
    return [native for native in found if native.copy is None]


def _sizes(config: ModelConfig, architecture: str, file_type: int) -> dict[str, Value]:
    """What llama.cpp builds the model by."""
    _require_expressible(config)
    attention, is_llama, is_latent = config.attention, architecture == "llama", architecture == _LATENT
    own_heads = not is_latent and "head_dim" in (config.hf or {}) and (config.hf or {})["head_dim"] is not None
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
    if is_latent:
        sizes |= _latent_sizes(config) | _yarn(config)
    general = {
        "general.architecture": Value("string", architecture),
        "general.type": Value("string", "model"),
        "general.file_type": Value("u32", file_type),
        "general.quantization_version": Value("u32", 2),
    }
    return general | {f"{architecture}.{name}": value for name, value in sizes.items()}


def _latent_sizes(config: ModelConfig) -> dict[str, Value]:
    """Of deepseek2, which computes latent attention with one key and value for all heads: the latent vector and what rotates.

    How experts are chosen is what the family does, whatever its config.json leaves out: without a word llama.cpp takes softmax.
    """
    attention, latent, experts = config.attention, config.latent, config.experts
    sizes = {
        "vocab_size": Value("u32", config.vocab),
        "attention.head_count_kv": Value("u32", 1),
        "attention.kv_lora_rank": Value("u32", latent.kv_rank),
        "attention.key_length": Value("u32", latent.kv_rank + latent.rope_dim),
        "attention.value_length": Value("u32", latent.kv_rank),
        "attention.key_length_mla": Value("u32", attention.head_dim),
        "attention.value_length_mla": Value("u32", latent.v_dim),
        "rope.dimension_count": Value("u32", latent.rope_dim),
        "leading_dense_block_count": Value("u32", min(config.layers_with("moe"))),
        "expert_shared_count": Value("u32", experts.shared_ffn // experts.ffn),
        "expert_weights_scale": Value("f32", experts.scale or 1.0),
        "expert_weights_norm": Value("bool", experts.renormalize),
        "expert_gating_func": Value("u32", _SCORES[experts.score]),
    }
    if latent.q_rank:
        sizes["attention.q_lora_rank"] = Value("u32", latent.q_rank)
    if experts.groups:
        sizes["expert_group_count"] = Value("u32", experts.groups)
        sizes["expert_group_used_count"] = Value("u32", experts.group_topk)
    return sizes


def _yarn(config: ModelConfig) -> dict[str, Value]:
    """Of deepseek2, which takes mscale for mscale_all_dim, stored as a tenth. Raises NotExpressible where they differ."""
    scaling = {name: value for name, value in (config.positions.scaling or {}).items() if value is not None}
    if not scaling:
        return {}
    mscale = scaling.get("mscale")
    truncated = scaling.pop("truncate", True)
    if (
        not mscale
        or mscale != scaling.get("mscale_all_dim")
        or not truncated
        or scaling.keys() - _YARN
        or _ORIGINAL not in scaling
    ):
        raise NotExpressible(
            f"--saver gguf: rope scaling {dict(scaling)} is not supported for {config.family}: llama.cpp has yarn with one number for "
            "mscale and mscale_all_dim"
        )
    return {
        "rope.scaling.type": Value("string", "yarn"),
        "rope.scaling.factor": Value("f32", scaling["factor"]),
        "rope.scaling.original_context_length": Value("u32", scaling[_ORIGINAL]),
        "rope.scaling.yarn_beta_fast": Value("f32", scaling.get("beta_fast", 32.0)),
        "rope.scaling.yarn_beta_slow": Value("f32", scaling.get("beta_slow", 1.0)),
        "rope.scaling.yarn_log_multiplier": Value("f32", 0.1 * mscale),
    }


def _require_expressible(config: ModelConfig) -> None:
    scaling, is_latent = config.positions.scaling, ARCHITECTURES[config.family] == _LATENT
    usable = "yarn" if is_latent else "llama3"
    if scaling is not None and scaling.get("rope_type") != usable:
        raise NotExpressible(
            f"--saver gguf: rope scaling {scaling.get('rope_type')!r} is not supported; only {usable} is"
        )
    if config.window is not None and config.window < config.max_positions:
        raise NotExpressible(f"--saver gguf: a window of {config.window:,} positions is not supported")
    if is_latent:
        _require_latent_expressible(config)
    elif config.experts.count and (not config.experts.renormalize or config.has("dense", 0)):
        raise NotExpressible(
            "--saver gguf: this mixture of experts is not supported: every layer has one, whose weights sum up to 1"
        )


def _require_latent_expressible(config: ModelConfig) -> None:
    """deepseek2 has dense layers before all others, and shared experts as wide as routed ones."""
    layers, experts = config.layers_with("moe"), config.experts
    if not layers or min(layers) + len(layers) != config.layer_count or experts.shared_ffn % experts.ffn:
        raise NotExpressible(
            "--saver gguf: this mixture of experts is not supported: from some layer on every one has experts, shared ones as wide as "
            "the others"
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
