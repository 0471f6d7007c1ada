"""GGUF for llama.cpp: one file with weights, the model's sizes and its tokenizer, of the architectures that are checked."""

from collections.abc import Collection, Mapping
from pathlib import Path

from formats import gguf_header
from formats.gguf import BLOCK, KINDS, GgufLayout, Value
from formats.tensor import FileTensor, InputFile, LazyTensor, Shape, matrix_shape
from megaconv.engine.gguf_tokenizer import tokenizer_values
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.engine.stored_forms import LEFT_OUT, Form, stored_shape
from megaconv.errors import NotExpressible, UsageError
from megaconv.families import Family, family, family_of_hf
from megaconv.families.parts.gguf_config import config_of, shortest
from megaconv.families.parts.gguf_metadata import divisors, metadata
from megaconv.families.parts.gguf_metadata import notices as metadata_notices
from megaconv.families.parts.gguf_names import ARCHITECTURES, DIVISORS, gguf_rows
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED, changed, fields_of, one_or_each, require_kept
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
    architecture = ARCHITECTURES[_family(config).name]
    constants = {name: found.tobytes() for name, found in divisors(config).items()}
    tensors: dict[str, tuple[Shape, str]] = {name: ((len(each) // 4,), "float32") for name, each in constants.items()}
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
    values = metadata(config, KINDS[main].file_type)
    _require_kept(config, values, tensors)
    if options.extra.get("tokenizer") == "none":  # whose tokens llama.cpp would count
        values[f"{architecture}.vocab_size"] = Value("u32", config.vocab)
    values |= tokenizer_values(header.files, config, options.extra)
    notices = [f"matrices are stored as {main}, norms and biases as float32", *metadata_notices(config)]
    if config.mtp_layers:
        notices.append(
            f"{config.mtp_layers} MTP layer(s) are left out: {architecture} has none in llama.cpp; outputs don't change"
        )
    return OutputPlan({FILE: GgufLayout(values, tensors, constants)}, placements, notices=notices)


def read_back(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of an output as they are stored, those of Q8_0 in bytes."""
    path = directory / FILE
    file = InputFile.open(path)
    return {
        name: FileTensor(
            file,
            each.offset,
            stored_shape(each.shape, Form(each.dtype)),
            "uint8" if each.dtype == "q8_0" else each.dtype,
        )
        for name, each in gguf_header.read(path).tensors.items()
        if each.dtype in KINDS
    }


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


def _require_kept(config: ModelConfig, values: Mapping[str, Value], names: Collection[str]) -> None:
    """Raises NotExpressible, naming it, for what llama.cpp would build otherwise: what is read back from the metadata differs."""
    said = {name: value.value for name, value in values.items()}
    if divisors(config):  # which say by how much positions are scaled, in the place of metadata
        config = changed(config, {"positions.scaling": None})
        said = {name: value for name, value in said.items() if ".rope.scaling." not in name}
    raw = config_of(said, [name for name in names if name not in DIVISORS], config.vocab, "--saver gguf")
    back = family_of_hf(raw, "--saver gguf").read_hf(raw)
    where = f"llama.cpp's {ARCHITECTURES[config.family]}"
    require_kept(_comparable(config), _comparable(back), where, but=(*NOT_COMPUTED, "mtp_layers"))


def _comparable(config: ModelConfig) -> ModelConfig:
    """With numbers as float32 keeps them, and without what has no effect: windows beyond all positions, groups all of which are taken."""
    found = {name: shortest(value) for name, value in fields_of(config).items() if isinstance(value, float)}
    windows = [
        None if layer.window is not None and layer.window >= config.max_positions else layer.window
        for layer in config.layers
    ]
    experts = config.experts
    groups = experts.groups if experts.groups != experts.group_topk else None
    idle = {"experts.groups": groups, "experts.group_topk": groups and experts.group_topk}
    return changed(config, {**found, **idle, "layers.window": one_or_each(tuple(windows))})
