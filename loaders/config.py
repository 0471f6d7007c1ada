"""A config.json without weights: the names and shapes of the model that it describes, for `inspect` and `plan`."""

from pathlib import Path

from formats.tensor import ITEMSIZE
from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import CorruptCheckpoint, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.families.parts.whole_model import named
from megaconv.huggingface.weight_files import is_weights, no_weights
from megaconv.loader import Loader
from megaconv.model.ir import Header, Key, OpenedSource, TensorInfo
from megaconv.model.table import canonical_shapes
from megaconv.options import LoadOptions


def detect(path: Path) -> bool:
    if not path.is_dir():
        return path.name == CONFIG_NAME
    return (path / CONFIG_NAME).is_file() and not any(map(is_weights, path.iterdir()))


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a config.json. Raises CorruptCheckpoint if weights are needed.

    Raises UsageError for a multimodal model, since its configuration doesn't list the tensors outside the language
    model.
    """
    if options.needs_weights:
        raise no_weights(path)
    given = options.config or path
    file = given / CONFIG_NAME if given.is_dir() else given
    family, config = read_config(file, text_only=options.text_only, whole=True)
    if config.whole is not None:
        raise UsageError(
            f"{file}: {named(config.whole.config)} is a multimodal model, and a {CONFIG_NAME} doesn't list tensors outside its language "
            "model; --text-only reads the language model alone"
        )
    _require_dtype(config.dtype, file)
    shapes = canonical_shapes(family.rows, config)
    manifest = {Key(name): TensorInfo(shape, config.dtype) for name, shape in shapes.items()}
    header = Header(
        config,
        manifest,
        files=find_sidecars(file.parent),
        source=f"{CONFIG_NAME} alone",
        has_weights=False,
    )
    return OpenedSource(header, {})


def _require_dtype(dtype: str, file: Path) -> None:
    """Raise CorruptCheckpoint for a dtype of unknown size. Files with weights have a dtype for each tensor."""
    if dtype not in ITEMSIZE:
        raise CorruptCheckpoint(
            f"{file}: dtype {dtype!r:.60} is not known; expected one such as bfloat16, float16 or float32"
        )


LOADER = Loader(
    name="config",
    description="config.json alone, without weights: for inspect and plan",
    detect=detect,
    open=open,
    has_text_only=True,
)
