"""Hugging Face directories: config.json, tokenizer files and safetensors in shards, ready for from_pretrained."""

from formats.output import FileLayout, PlainFile
from formats.safetensors import SafetensorsLayout, index_json, shard
from formats.tensor import ITEMSIZE, matrix_shape
from megaconv.families import family
from megaconv.hf_config import CONFIG_NAME, config_json
from megaconv.ir import Header, Key
from megaconv.layout import Chunk, Layout
from megaconv.options import SaveOptions
from megaconv.plan import OutputPlan, Placement
from megaconv.table import NativeTensor, native_tensors

DESCRIPTION = "Hugging Face transformers: config.json with sharded *.safetensors"


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises NotExpressible when the family has no config.json for this model."""
    config, table = header.config, family(header.config.family)
    written = table.write_hf(config)
    whole = Chunk(0, 0, 0, config.layers, is_first=True, is_last=True)
    natives = [
        native
        for native in native_tensors(table.rows, config, "hf", Layout(), 0, whole, config.vocab)
        if not native.tied_copy or native.mtp_copy
    ]
    shards = shard([(native.name, native.shape, _dtype(header, native)) for native in natives], options.max_shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    )
    file_of = {tensor: name for name, members in zip(names, shards, strict=True) for tensor, _, _ in members}
    files: dict[str, FileLayout] = {CONFIG_NAME: PlainFile(config_json(config, written))}
    files |= {name: PlainFile(path.read_bytes()) for name, path in header.files.items()}
    files |= {
        name: SafetensorsLayout({tensor: (shape, dtype) for tensor, shape, dtype in members})
        for name, members in zip(names, shards, strict=True)
    }
    if len(shards) > 1:
        files["model.safetensors.index.json"] = PlainFile(index_json(file_of, header.nbytes))
    placements: dict[Key, list[Placement]] = {}
    for native in natives:
        row_bytes = matrix_shape(native.shape)[1] * ITEMSIZE[_dtype(header, native)]
        for name, regions in native.parts.items():
            placements.setdefault(Key(name), []).append(
                Placement(file_of[native.name], native.name, row_bytes, regions)
            )
    return OutputPlan(files, placements)


def _dtype(header: Header, native: NativeTensor) -> str:
    return header.manifest[Key(next(iter(native.parts)))].dtype
