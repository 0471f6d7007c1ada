"""GGUF for llama.cpp: one file with weights, the model's sizes and its tokenizer, for the architectures that are
tested."""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from formats import gguf_header
from formats.gguf import BLOCK_TYPES, KINDS, GgufLayout, Value
from formats.gguf_header import GgufHeader
from formats.tensor import ITEMSIZE, FileTensor, InputFile, LazyTensor, Shape, matrix_shape
from formats.wording import counted, listing
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.engine.reading_back import Stored, as_streamed
from megaconv.errors import CorruptCheckpoint, NotExpressible, TensorMismatch
from megaconv.families import Family, family, family_of_hf
from megaconv.gguf.config import config_of, shortest
from megaconv.gguf.importance import importances
from megaconv.gguf.metadata import divisors, metadata
from megaconv.gguf.metadata import notices as metadata_notices
from megaconv.gguf.names import ARCHITECTURES, DIVISORS, gguf_rows
from megaconv.gguf.tokenizer import tokenizer_values
from megaconv.gguf.types import ALL_TYPES, MIXTURES, PLAIN_TYPES, types_of
from megaconv.model.ceilings import require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.fields import NOT_COMPUTED, changed, fields_of, one_or_each
from megaconv.model.ir import Header, Key, TensorInfo, main_dtype
from megaconv.model.meaning import require_kept
from megaconv.model.naming import GGUF
from megaconv.model.natives import NativeTensor, unsharded_tensors
from megaconv.model.table import canonical_shapes
from megaconv.options import SaveOptions
from megaconv.saver import Saver
from megaconv.values.forms import LEFT_OUT, Form, Scaling
from megaconv.values.stored_forms import stored_shape

FILE = "model.gguf"
_MOST_U32 = (1 << 32) - 1


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    return ("calibration",)


def forms(header: Header, options: SaveOptions) -> dict[Key, Form]:
    """The storage form of each tensor. Raises UsageError for an unknown type, and NotExpressible for another family."""
    natives = _natives(header.config)
    kinds = types_of(natives, _wanted(header, options), header.config)
    scalings = importances(natives, kinds, header, options)
    zero_centered = header.config.norm.zero_centered
    found: dict[Key, Form] = {}
    for native in natives:
        is_norm = native.name.endswith("_norm.weight")
        added = 1 if is_norm and zero_centered else 0
        for name in native.parts:
            scaling = scalings.get(name, Scaling())
            found[Key(name)] = Form(kinds[native.name], added, scaling=scaling)
    predicting = (key for key in header.manifest if key.name.startswith("mtp."))
    return found | dict.fromkeys(predicting, Form(LEFT_OUT))


def _wanted(header: Header, options: SaveOptions) -> str:
    """The requested type of matrices, by default that of the source."""
    given = options.extra.get("gguf_type")
    main = main_dtype(header.manifest)
    names = {dtype: name for name, dtype in PLAIN_TYPES.items()}
    return names.get(main, main) if given is None else given


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises NotExpressible for values that llama.cpp can't represent.

    header: describes tensors in the form that forms() returns.
    """
    config = header.config
    architecture = ARCHITECTURES[_family(config).name]
    constants = {name: found.tobytes() for name, found in divisors(config).items()}
    mixture = options.extra.get("gguf_type", "")
    kinds = types_of(_natives(config), mixture, config) if mixture in MIXTURES else {}
    tensors, placements = _placed(config, header.manifest, kinds)
    of_constants = {name: ((len(each) // 4,), "float32") for name, each in constants.items()}
    tensors = of_constants | tensors
    of_matrices = Counter(kind for shape, kind in tensors.values() if len(shape) > 1)
    ((main, _),) = of_matrices.most_common(1)
    file_type = (MIXTURES[mixture] if mixture in MIXTURES else KINDS[main]).file_type
    values = metadata(config, file_type)
    _require_kept(config, values, tensors)
    if options.extra.get("tokenizer") == "none":
        # Without a tokenizer, llama.cpp can't count its tokens.
        values[f"{architecture}.vocab_size"] = Value("u32", config.vocab)
    values |= tokenizer_values(header, config, options.extra)
    _require_u32(values)
    rounded = sorted(set(of_matrices) - {"float32"})
    notices = [
        f"matrices are stored as {', '.join(rounded or [main])}, norms and biases as float32",
        *metadata_notices(config),
    ]
    if config.norm.zero_centered and config.dtype == "float32":
        notices.append(
            "norms are stored with 1 added, which rounds weights of float32; outputs don't change, and the weights that are read back do"
        )
    if config.mtp_layers:
        notices.append(
            f"{counted(config.mtp_layers, 'MTP layer')} left out: {architecture} has none in llama.cpp; outputs don't change"
        )
    return OutputPlan({FILE: GgufLayout(values, tensors, constants)}, placements, notices=notices)


def _require_u32(values: Mapping[str, Value]) -> None:
    """Raise NotExpressible for a size that has more than 32 bits."""
    for key, (kind, value) in values.items():
        if kind == "u32" and isinstance(value, int) and value > _MOST_U32:
            raise NotExpressible(
                f"--saver gguf: {key} is {value:,}, and GGUF holds at most {_MOST_U32:,}; correct config.json"
            )


def _placed(
    config: ModelConfig, manifest: Mapping[Key, TensorInfo], kinds: Mapping[str, str]
) -> tuple[dict[str, tuple[Shape, str]], dict[Key, list[Placement]]]:
    """(shape and kind of each tensor in the file, placements of each canonical tensor). manifest: tensors in their
    stored form. kinds: the type of each tensor in blocks by name."""
    tensors: dict[str, tuple[Shape, str]] = {}
    placements: dict[Key, list[Placement]] = {}
    for native in _natives(config):
        info = manifest[Key(next(iter(native.parts)))]
        kind = kinds[native.name] if info.dtype == "uint8" else info.dtype
        tensors[native.name] = (native.shape, kind)
        row_bytes = _row_bytes(native, kind)
        for name, regions in native.parts.items():
            # Columns of the stored form are bytes of blocks, if the tensor is quantized.
            _, cols = matrix_shape(manifest[Key(name)].shape)
            stored = []
            for region in regions:
                box = region.box._replace(col0=0, col1=cols)
                stored.append(region._replace(box=box))
            placement = Placement(FILE, native.name, row_bytes, stored)
            placements.setdefault(Key(name), []).append(placement)
    return tensors, placements


def read_back(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of an output as they are stored. Quantized tensors are bytes."""
    path = directory / FILE
    return _stored_tensors(path, gguf_header.read(path))


def as_stored(path: Path) -> Stored:
    """A file of this saver, or its directory, in the form of its fingerprints: with stored values.

    The file's own metadata describe the model. Raises CheckpointError.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CorruptCheckpoint(
            f"{path}: has {len(files)} GGUF files, and one was written; remove the others: {listing([each.name for each in files])}"
        )
    file = files[0] if files else path / FILE
    described = gguf_header.read(file)
    with well_formed(str(file)):
        config = _config_of(file, described)
        manifest = _stored_manifest(file, config, described)
        kinds = {name: each.dtype for name, each in described.tensors.items()}
        tensors, placements = _placed(config, manifest, kinds)
    plan = OutputPlan({FILE: GgufLayout({}, tensors, {})}, placements)
    source = as_streamed(file, _stored_tensors(file, described), Header(config, manifest), plan)
    opened = InputFile.open(file)
    # Metadata, then the constants: tensors of the file that are not tensors of the model.
    constants = [opened.read(0, described.nbytes)]
    for name, each in described.tensors.items():
        if name not in tensors:
            constants.append(opened.read(each.offset, each.nbytes))
    return Stored(source, {FILE: b"".join(constants)})


def _config_of(file: Path, described: GgufHeader) -> ModelConfig:
    """The configuration from the metadata of a file of this saver.

    The metadata give everything except position scaling, which has no effect on tensors.
    """
    embedding = described.tensors.get("token_embd.weight")
    if embedding is None:
        raise TensorMismatch(f"{file}: has no token_embd.weight", code="missing-tensor")
    keys = {name: value for name, value in described.keys.items() if ".rope.scaling." not in name}
    where = str(file)
    raw = config_of(
        keys,
        tensors=[name for name in described.tensors if name not in DIVISORS],
        vocab=embedding.shape[0],
        where=where,
    )
    require_countable(raw, where)
    return family_of_hf(raw, where).read_hf(raw)


def _stored_manifest(
    file: Path, config: ModelConfig, described: GgufHeader
) -> dict[Key, TensorInfo]:
    """The canonical tensors in the form in which the file stores them."""
    shapes = canonical_shapes(gguf_rows(_family(config)), config)
    found: dict[Key, TensorInfo] = {}
    for native in _natives(config):
        each = described.tensors.get(native.name)
        if each is None or each.shape != native.shape or each.dtype not in KINDS:
            raise TensorMismatch(
                f"{file}: {native.name} should be {list(native.shape)} by the file's own metadata"
            )
        for name in native.parts:
            shape = stored_shape(shapes[name], Form(each.dtype))
            found[Key(name)] = TensorInfo(shape, _stored_dtype(each.dtype))
    return found


def _stored_tensors(path: Path, described: GgufHeader) -> dict[str, LazyTensor]:
    file = InputFile.open(path)
    found: dict[str, LazyTensor] = {}
    for name, each in described.tensors.items():
        if each.dtype in KINDS:
            shape = stored_shape(each.shape, Form(each.dtype))
            found[name] = FileTensor(file, each.offset, shape, _stored_dtype(each.dtype))
    return found


def _stored_dtype(kind: str) -> str:
    return "uint8" if kind in BLOCK_TYPES else kind


def _row_bytes(native: NativeTensor, kind: str) -> int:
    rows_of_blocks = stored_shape(native.shape, Form(kind))
    return matrix_shape(rows_of_blocks)[1] * ITEMSIZE[_stored_dtype(kind)]


def _family(config: ModelConfig) -> Family:
    if config.family not in ARCHITECTURES:
        raise NotExpressible(
            f"--saver gguf: {config.family} is not supported; supported are {', '.join(ARCHITECTURES)}. For any other family, use "
            "--saver hf and then llama.cpp's own converter"
        )
    return family(config.family)


def _natives(config: ModelConfig) -> list[NativeTensor]:
    config = changed(config, {"mtp_layers": 0})
    found = unsharded_tensors(gguf_rows(_family(config)), config, GGUF)
    return [native for native in found if native.copy is None]


def _require_kept(config: ModelConfig, values: Mapping[str, Value], names: Collection[str]) -> None:
    """Raise NotExpressible, with the field's name, if the metadata read back give another model."""
    keys = {name: value.value for name, value in values.items()}
    if divisors(config):  # the divisors replace the metadata of position scaling
        config = changed(config, {"positions.scaling": None})
        keys = {name: value for name, value in keys.items() if ".rope.scaling." not in name}
    tensors = [name for name in names if name not in DIVISORS]
    raw = config_of(keys, tensors, config.vocab, where="--saver gguf")
    _require_head_size(config, raw)
    back = family_of_hf(raw, "--saver gguf").read_hf(raw)
    require_kept(
        _comparable(config),
        _comparable(back),
        f"llama.cpp's {ARCHITECTURES[config.family]}",
        but=(*NOT_COMPUTED, "mtp_layers"),
    )


def _require_head_size(config: ModelConfig, raw: Mapping[str, Any]) -> None:
    """Raise NotExpressible for heads of another size than the metadata give. The rotating share of a head depends on it."""
    size, found = config.attention.head_dim, raw.get("head_dim")
    if found not in (None, size):
        raise NotExpressible(
            f"the model's attention.head_dim is {size}, which llama.cpp's {ARCHITECTURES[config.family]} can't represent: it would be "
            f"{found} there"
        )


def _comparable(config: ModelConfig) -> ModelConfig:
    """The configuration with numbers rounded to float32, and without fields that have no effect.

    A window as long as all positions has no effect, and neither have groups if all of them are selected.
    """
    found: dict[str, Any] = {
        name: shortest(value)
        for name, value in fields_of(config).items()
        if isinstance(value, float)
    }
    windows = []
    for layer in config.layers:
        sees_all = layer.window is not None and layer.window >= config.max_positions
        windows.append(None if sees_all else layer.window)
    found["layers.window"] = one_or_each(tuple(windows))
    experts = config.experts
    if not experts.groups or experts.groups == experts.group_topk:
        found |= {"experts.groups": None, "experts.group_topk": None}
    return changed(config, found)


SAVER = Saver(
    name="gguf",
    description="GGUF for llama.cpp: model.gguf in F32, F16, BF16, Q8_0, Q4_0 or k-quants",
    plan=plan,
    options={
        "gguf_type": f"the type of matrices: {', '.join(ALL_TYPES)}; default: the model's own dtype",
        "tokenizer_pre": "llama.cpp's name for how a byte-level tokenizer splits text, where it isn't recognised: llama-bpe, qwen2 ...",
        "tokenizer": "none: leave the tokenizer out",
    },
    uses=uses,
    forms=forms,
    read_back=read_back,
    as_stored=as_stored,
)
