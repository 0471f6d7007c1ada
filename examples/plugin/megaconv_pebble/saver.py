"""Writes a model of any family into one `.pebble` file, with the tokenizer's files beside it."""

import json

from formats.output import FileLayout
from formats.tensor import ITEMSIZE, matrix_shape
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.engine.sidecars import small_files
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.model.ir import Header, Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from megaconv.options import SaveOptions
from megaconv.saver import Saver
from megaconv_pebble.pebble_file import PebbleLayout

FILE = "model.pebble"


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises NotExpressible where the family's config.json has no place for something that the model has."""
    config, table = header.config, family(header.config.family)
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    natives = [
        native
        for native in native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab)
        if native.copy is None
    ]
    # The pieces of a fused tensor have one dtype; it is that of each.
    dtypes = {
        native.name: header.manifest[Key(next(iter(native.parts)))].dtype for native in natives
    }
    said = json.loads(table.config_json(config))
    shapes = {native.name: (native.shape, dtypes[native.name]) for native in natives}
    files: dict[str, FileLayout] = {**small_files(header)}
    files[FILE] = PebbleLayout(said, shapes, _alignment(options))
    placements: dict[Key, list[Placement]] = {}
    for native in natives:
        row_bytes = matrix_shape(native.shape)[1] * ITEMSIZE[dtypes[native.name]]
        for name, regions in native.parts.items():
            placements.setdefault(Key(name), []).append(
                Placement(FILE, native.name, row_bytes, regions)
            )
    return OutputPlan(files, placements)


def _alignment(options: SaveOptions) -> int:
    said = options.extra.get("alignment", "64")
    if not said.isdecimal() or not int(said):
        raise UsageError(f"--option alignment={said}: expected a number of bytes, such as 64")
    return int(said)


def uses(options: SaveOptions) -> tuple[str, ...]:
    """No field of the options: a Pebble file has no layout. megaconv refuses `--tp 2` then."""
    return ()


SAVER = Saver(
    name="pebble",
    description="Pebble: a model in one *.pebble file (an example of a plugin)",
    plan=plan,
    uses=uses,
    options={
        "alignment": "bytes, to a multiple of which each tensor's place is rounded up; 64 unless said"
    },
)
