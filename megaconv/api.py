"""The Python interface: the same work as the commands, with plain arguments."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from megaconv.commands.comparison import Diff, diff_sources, open_both, source_checks
from megaconv.commands.inspection import inspect as inspect
from megaconv.commands.verification import verify as verify
from megaconv.engine.conversion import convert as run_conversion
from megaconv.engine.conversion import fingerprint as fingerprint
from megaconv.engine.plan import default_workers
from megaconv.engine.preparation import ConvertOptions, Report
from megaconv.model.layout import LayerSplit
from megaconv.options import LoadOptions, SaveOptions, adapter_choice, byte_size, checkpoint_types, numbers

_AS_ON_THE_COMMAND_LINE = {
    "moe_grouped_gemm": "grouped_experts", "make_vocab_size_divisible_by": "vocab_divisor", "dist_files": "files",
    "use_distributed_optimizer": "distributed_optimizer", "max_shard_size": "max_shard_bytes",
}  # fmt: skip
"""Options that have another name there than the field of SaveOptions."""


def convert(
    load_dir: str | Path,
    save_dir: str | Path,
    *,
    saver: str,
    loader: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    layer_split: str | Iterable[int] | None = None,
    split_rank: int | None = None,
    checkpoint_type: str | None = None,
    config: str | Path | None = None,
    true_vocab_size: int | None = None,
    text_only: bool = False,
    dtype: str | None = None,
    optimizer: bool | None = None,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    check_source: bool = True,
    max_memory: int | str = "256MiB",
    workers: int = 0,
    adapters: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    **save_options: Any,
) -> Report:
    """Convert load_dir (a directory or a Hub id) into save_dir, which must not exist yet.

    Sizes left out stay as the source has them. optimizer: whether its state goes along; None: where both sides can hold
    it. text_only: of a model that sees or hears, only the language model in it. check_source: a source that has a
    megaconv.json has to be what that says.
    adapters: LoRA adapters to merge into the weights, each as `DIR` or `DIR:WEIGHT`.
    split_rank: how many of the pp stages are a T5's encoder's, the first ones. options: of
    the loader's and the saver's own, by key, as `megaconv formats` lists them. save_options: further options as on the command
    line, such as transformer_impl="local", max_shard_size="5GB" or moe_grouped_gemm=True, or fields of SaveOptions. Sizes are bytes,
    or text with a unit. progress: called with (bytes done, bytes in all) of the tensors after every block, from any thread.
    Raises megaconv.errors.CheckpointError.
    """
    save_options = {_AS_ON_THE_COMMAND_LINE.get(name, name): value for name, value in save_options.items()}
    if "max_shard_bytes" in save_options:
        save_options["max_shard_bytes"] = byte_size(save_options["max_shard_bytes"])
    if isinstance(save_options.get("base"), str):
        save_options["base"] = Path(save_options["base"])
    split = LayerSplit(layers=numbers(layer_split), split_rank=split_rank)
    read_type, written_type = checkpoint_types(checkpoint_type, saver)
    asked = ConvertOptions(
        loader=loader or ("llama_mistral" if read_type else None),
        load=LoadOptions(Path(config) if config else None, true_vocab_size, read_type, text_only=text_only),
        save=SaveOptions(tp=tp, pp=pp, vpp=vpp, split=split, checkpoint_type=written_type, **save_options),
        dtype=dtype, optimizer=optimizer, max_memory=byte_size(max_memory), workers=workers, verify=verify, resume=resume,
        overwrite=overwrite,
        extra=options or {}, check_source=check_source, adapters=tuple(map(adapter_choice, adapters)),
    )  # fmt: skip
    counter = _Counter(progress or (lambda done, total: None))
    return run_conversion(load_dir, save_dir, saver, asked, counter.advance, planned=counter.planned)


class _Counter:
    """Adds up what a conversion has moved, for somebody who wants to know how far it is."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell, self._lock, self._done, self._total = tell, Lock(), 0, 0

    def planned(self, report: Report) -> None:
        self._total = report.header.nbytes

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._tell(self._done, self._total)


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
    checks = source_checks(a, left, b, right) if check_source else None
    return diff_sources(left, right, default_workers(writing=False), checks=checks)
