"""Reads `.pebble` files: a file, a directory with one in it, or pebble://NAME, which lies in a store."""

from dataclasses import replace
from pathlib import Path

from megaconv.engine.sidecars import find_sidecars
from megaconv.errors import UnknownFormat, UsageError
from megaconv.families import family_of_hf
from megaconv.huggingface.canonical import whole_model
from megaconv.loader import Loader
from megaconv.model.check import well_formed
from megaconv.model.ir import Header, OpenedSource, describe, main_dtype
from megaconv.model.naming import HF
from megaconv.options import LoadOptions
from megaconv_pebble import pebble_file


def detect(path: Path | str) -> bool:
    """A URI of the record's schemes comes as a str; whatever it names is ours."""
    return (
        isinstance(path, str)
        or path.suffix == ".pebble"
        or (path.is_dir() and len(_files(path)) == 1)
    )


def open(path: Path | str, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a file that is damaged, or holds no model of a known family."""
    file = _find(path, options)
    raw, tensors = pebble_file.read(file)
    with well_formed(str(file)):
        family = family_of_hf(raw, str(file))
        config = family.read_hf(raw)
    config, by_key = whole_model(family, config, HF, tensors, str(file))
    manifest = describe(by_key)
    header = Header(
        replace(config, dtype=main_dtype(manifest)),
        manifest,
        files=find_sidecars(file.parent),
        source="pebble",
        # Of a path megaconv looks at the files itself, to know whether --resume may go on; of a URI it can't.
        revision=f"{file.stat().st_size} {file.stat().st_mtime_ns}"
        if isinstance(path, str)
        else None,
    )
    return OpenedSource(header, by_key)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.pebble"))


def _find(path: Path | str, options: LoadOptions) -> Path:
    if isinstance(path, Path):
        found = _files(path) if path.is_dir() else [path]
        if len(found) != 1:
            raise UnknownFormat(
                f"{path}: expected one .pebble file, found {len(found)}; give the path of one"
            )
        return found[0]
    if "store" not in options.extra:
        raise UsageError(f"{path}: lies in a store; give --option store=DIRECTORY")
    store = Path(options.extra["store"])
    file = store / f"{path.removeprefix('pebble://')}.pebble"
    if not file.resolve().is_relative_to(store.resolve()):
        raise UsageError(f"{path}: leads out of the store {store}")
    return file


LOADER = Loader(
    name="pebble",
    description="Pebble: a model in one *.pebble file (an example of a plugin)",
    detect=detect,
    open=open,
    options={"store": "the directory that pebble://NAME is looked for in"},
    schemes=("pebble",),
)
