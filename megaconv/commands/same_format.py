"""`convert` without a saver: writes a Megatron checkpoint in its own format, at the given sizes or with the given changes.

Megatron's own tools do the same. A directory in a format that no saver writes unchanged needs a saver.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from formats import rank_files
from formats.torch_dist import read_backend
from megaconv import registry
from megaconv.engine.preparation import open_input
from megaconv.errors import UsageError
from megaconv.hub import nothing_at, resolve
from megaconv.input import Input, input_at
from megaconv.megatron.distributed.run_config import RUN_CONFIG
from megaconv.model.ir import Header
from megaconv.options import ConvertOptions, SaveOptions


def require_sizes(options: ConvertOptions) -> None:
    """Raises UsageError for a missing saver if neither a parallel size of the output is given nor another model."""
    save = options.save
    sizes = (save.tp, save.pp, save.vpp, save.ep, save.etp)
    has_sizes = any(size is not None for size in sizes) or save.split != SaveOptions().split
    if not has_sizes and not options.derives_model:
        raise _no_saver()


def in_the_same_format(load_dir: str | Path, options: ConvertOptions) -> tuple[str, SaveOptions]:
    """(the saver's name, the options completed with the format of the input).

    Raises UsageError for an input that isn't a Megatron checkpoint, and the errors of opening the input.
    """
    require_sizes(options)
    place = resolve(load_dir)
    if isinstance(place, Path) and not place.exists():
        raise nothing_at(place)
    # Before the messages about formats, because an unknown input is the first error.
    found = input_at(load_dir, place, options.loader, options.load)
    version = rank_files.find_version(place) if isinstance(place, Path) else None
    if version is None or (version / RUN_CONFIG).is_file():
        raise _no_saver()
    saver = found.loader.name
    ckpt_format = read_backend(version) or ("torch" if rank_files.is_rank_files(version) else None)
    if saver not in ("core", "legacy") or ckpt_format not in ("torch", "torch_dist", "zarr"):
        raise _no_saver()
    if saver == "legacy":
        return saver, options.save
    metadata_only = replace(options, load=replace(options.load, metadata_only=True))
    header = open_input(found, registry.saver(saver), metadata_only)[0].header
    if header.adapter is not None:
        raise _no_saver()
    return saver, _completed(options.save, header, ckpt_format)


def as_stored(options: SaveOptions, header: Header, found: Input) -> SaveOptions:
    """The options, completed with the format and the modules of a Megatron core checkpoint."""
    version = rank_files.find_version(Path(found.place))
    ckpt_format = None if version is None else read_backend(version)
    return _completed(options, header, ckpt_format or "torch")


def _completed(options: SaveOptions, header: Header, ckpt_format: str) -> SaveOptions:
    """The options, completed with the source's modules.

    The names in rank files show which modules the model is built from. For distributed checkpoints, the run's arguments
    do.
    """
    run = header.training.arguments if ckpt_format != "torch" else {}
    grouped = "grouped" in header.source or bool(run.get("moe_grouped_gemm"))
    local = "local" in header.source or run.get("transformer_impl") == "local"
    stored: dict[str, Any] = {
        "ckpt_format": ckpt_format,
        "transformer_impl": "local" if local and not grouped else "transformer_engine",
    }
    asked = {name: value for name, value in stored.items() if name not in options.given}
    return replace(options, grouped_experts=options.grouped_experts or grouped, **asked)


def _no_saver() -> UsageError:
    return UsageError(
        f"--saver is missing; it names the output format. Choose one of {', '.join(registry.SAVERS)}"
    )
