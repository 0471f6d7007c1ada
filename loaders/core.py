"""Megatron core in any format: rank directories (`torch`), `torch_dist`, `zarr`; any parallel layout; also as Megatron-Bridge and
NeMo 2 save it."""

from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path

from formats import rank_files
from megaconv.errors import UsageError
from megaconv.megatron.arguments.sizes import CORE_SIZE_TENSORS
from megaconv.megatron.arguments.sparse import INDEXER_FROM, INDEXER_ORDER, ROPE_LAST, reads_rope_last
from megaconv.megatron.distributed.adapter_source import OPTION as LORA_ALPHA
from megaconv.megatron.distributed.adapter_source import is_adapter, open_adapter_source
from megaconv.megatron.distributed.source import find_dist, open_dist, open_files
from megaconv.megatron.rank_files.source import Spellings, open_model, open_ranks
from megaconv.megatron.states.names import describe_naming, naming_of
from megaconv.megatron.states.ranks import holds_legacy
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import Naming, with_rope_last
from megaconv.options import LoadOptions

DESCRIPTION = (
    "Megatron core: torch (mp_rank_*/model_optim_rng.pt), torch_dist (*.distcp), zarr; Megatron-Bridge, NeMo 2"
)
HAS_TEXT_ONLY = True
OPTIONS = {
    "out_norm": "what a gated delta net's out_norm.weight is: `plain` (Megatron's local layers, transformers), or `zero_centered` "
    "(Transformer Engine's layers: less 1); as transformer_impl of the checkpoint's args says if it isn't given",
    INDEXER_FROM: "which Megatron core the indexers of sparse attention are from: `0.16` (to 0.18, which have the elements that rotate "
    "last), or `0.19` (and later); as the checkpoint says if it isn't given, else 0.19",
    LORA_ALPHA: "of an adapter of Megatron-Bridge: its alpha, where there is no run_config.yaml to say it",
}


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    if version is not None and rank_files.is_rank_files(version):
        return not holds_legacy(version)
    return find_dist(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Raises CheckpointError for a checkpoint that is incomplete, contradicts itself, or is of no known family."""
    distributed, ckpt_format = find_dist(path) is not None, "torch"
    if distributed:
        files = open_files(path)
        if is_adapter(files.tensors):
            return open_adapter_source(files.version, files.tensors, options)
        source, ckpt_format = open_dist(files, options), files.backend
    else:
        source = open_ranks(path, options, legacy=False)
    names = [name for chunks in source.ranks.weights.values() for chunk in chunks for name in chunk]
    # A language model without norms before its sublayers doesn't show whose layers it is made of, its tower does.
    beside = [name for held in source.ranks.beside.values() for name in held]
    naming = _with_indexer(naming_of([*names, *beside]), names, source.args, options.extra)
    described = f"core, {ckpt_format} format" + ("" if distributed else f", {describe_naming(naming)}")
    described += f" of {source.writer}" if source.writer else ""
    naming = _with_out_norm(naming, names, source.args, options.extra.get("out_norm"), distributed=distributed)
    return open_model(source, options, Spellings(CORE_SIZE_TENSORS, naming, described), by_args=distributed)


def _with_indexer(naming: Naming, names: Collection[str], args: Namespace, asked: Mapping[str, str]) -> Naming:
    """Where latent norms are modules of their own, names don't say whose layers sparse attention is made of. Raises UsageError."""
    rope_last = reads_rope_last(args, names, asked)
    if rope_last:
        setattr(args, INDEXER_ORDER, ROPE_LAST)
    elif hasattr(args, INDEXER_ORDER):
        delattr(args, INDEXER_ORDER)
    if not any(".indexer." in name for name in names):
        return naming
    if getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine":
        naming = Naming(naming.scheme, tuple(variant for variant in naming.variants if variant != "local"))
    return with_rope_last(naming) if rope_last else naming


def _with_out_norm(
    naming: Naming, names: Collection[str], args: Namespace, asked: str | None, *, distributed: bool
) -> Naming:
    """Names alone don't say what an out_norm holds in a distributed checkpoint. Raises UsageError where its args don't either."""
    if asked not in (None, "plain", "zero_centered"):
        raise UsageError(f"--option out_norm={asked}: is not known; choose plain or zero_centered")
    if not any(name.endswith(".out_norm.weight") for name in names):
        return naming
    if asked is None and not distributed:
        return naming
    impl = getattr(args, "transformer_impl", None)
    if asked is None and impl is None:
        raise UsageError(
            "the checkpoint's args have no transformer_impl, which says how the weights of out_norm are stored; give "
            "--option out_norm=plain (Megatron's local layers) or --option out_norm=zero_centered (Transformer Engine's)",
            code="option-needed",
        )
    is_plain = asked == "plain" if asked else impl == "local"
    others = tuple(variant for variant in naming.variants if variant != "local_keys")
    if "local" in naming.variants:
        if not is_plain:
            raise UsageError(
                "--option out_norm=zero_centered: is for Transformer Engine's layers; these are Megatron's local ones"
            )
        return naming
    return Naming(naming.scheme, (*others, "local_keys")) if is_plain else naming
