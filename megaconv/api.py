"""The Python interface: the same work as the commands, with plain arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaconv.commands.comparison import Diff, diff_sources, open_both, source_checks
from megaconv.commands.inspection import inspect as inspect
from megaconv.commands.verification import verify as verify
from megaconv.engine.conversion import ConvertOptions, Report
from megaconv.engine.conversion import convert as run_conversion
from megaconv.engine.conversion import fingerprint as fingerprint
from megaconv.engine.plan import default_workers
from megaconv.model.layout import LayerSplit
from megaconv.options import LoadOptions, SaveOptions, adapter_choice, checkpoint_types


def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    *,
    saver: str,
    loader: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    layer_split: tuple[int, ...] | None = None,
    split_rank: int | None = None,
    checkpoint_type: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    dtype: str | None = None,
    optimizer: bool | None = None,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    check_source: bool = True,
    max_memory: int = 256 << 20,
    workers: int = 0,
    adapters: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    **save_options: Any,
) -> Report:
    """Convert load_dir (a directory or a Hub id) into save_dir, which must not exist yet.

    Sizes left out stay as the source has them. optimizer: whether its state goes along; None: where both sides can hold
    it. check_source: a source that has a megaconv.json has to be what that says.
    adapters: LoRA adapters to merge into the weights, each as `DIR` or `DIR:WEIGHT`.
    split_rank: how many of the pp stages are a T5's encoder's, the first ones. options: of
    the loader's and the saver's own, by key, as `megaconv formats` lists them. save_options: further fields of SaveOptions, such as
    transformer_impl, vocab_padding or max_shard_bytes. Raises megaconv.errors.CheckpointError.
    """
    split = LayerSplit(layers=layer_split, split_rank=split_rank)
    read_type, written_type = checkpoint_types(checkpoint_type, saver)
    asked = ConvertOptions(
        loader=loader or ("llama_mistral" if read_type else None),
        load=LoadOptions(Path(config) if config else None, true_vocab_size, read_type),
        save=SaveOptions(tp=tp, pp=pp, vpp=vpp, split=split, checkpoint_type=written_type, **save_options),
        dtype=dtype, optimizer=optimizer, max_memory=max_memory, workers=workers, verify=verify, resume=resume, overwrite=overwrite,
        extra=options or {}, check_source=check_source, adapters=tuple(map(adapter_choice, adapters)),
    )  # fmt: skip
    return run_conversion(load_dir, save_dir, saver, asked)


def diff(
    a: str | Path,
    b: str | Path,
    *,
    loader_a: str | None = None,
    loader_b: str | None = None,
    options: Mapping[str, str] | None = None,
    check_source: bool = True,
) -> Diff:
    """Compare two checkpoints of any kinds. options: of the loaders' own. check_source: each has to be what its own megaconv.json
    says, if it has one."""
    left, right = open_both(a, b, LoadOptions(extra=options or {}), (loader_a, loader_b))
    checks = source_checks(str(a), left, str(b), right) if check_source else None
    return diff_sources(left, right, default_workers(writing=False), checks=checks)
