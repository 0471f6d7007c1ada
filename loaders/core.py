"""Megatron core in any format and parallel layout: rank directories (`torch`), `torch_dist`, `zarr`.

The loader also reads the checkpoints of Megatron-Bridge and NeMo 2.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from formats import rank_files
from megaconv.errors import UsageError
from megaconv.loader import Loader
from megaconv.megatron.arguments.nemo_settings import require_agreement_beside
from megaconv.megatron.arguments.size_tensors import CORE_SIZE_TENSORS
from megaconv.megatron.arguments.sparse import (
    INDEXER_FROM,
    INDEXER_ORDER,
    ROPE_LAST,
    reads_rope_last,
)
from megaconv.megatron.arguments.swift import with_config_beside
from megaconv.megatron.distributed.adapter_settings import OPTION as LORA_ALPHA
from megaconv.megatron.distributed.keys import is_adapter
from megaconv.megatron.distributed.source import find_dist, open_dist, open_files
from megaconv.megatron.distributed.verl_files import with_config_beside as with_verl_config
from megaconv.megatron.rank_files import plain_norms
from megaconv.megatron.rank_files.source import Spellings, open_model, open_ranks
from megaconv.megatron.states.names import describe_naming, naming_of
from megaconv.megatron.states.ranks import holds_legacy
from megaconv.model.ir import OpenedSource
from megaconv.model.naming import Naming, with_rope_last
from megaconv.options import LoadOptions


def detect(path: Path) -> bool:
    version = rank_files.find_version(path)
    if version is not None and rank_files.is_rank_files(version):
        return not holds_legacy(version)
    return find_dist(path) is not None


def open(path: Path, options: LoadOptions) -> OpenedSource:  # noqa: A001
    """Open a checkpoint. Raises CheckpointError if it is incomplete, contradicts itself, or belongs to no known family."""
    distributed, ckpt_format = find_dist(path) is not None, "torch"
    if distributed:
        files = open_files(path)
        if is_adapter(files.tensors):
            # Every detection of a format imports this module, and few checkpoints are adapters.
            from megaconv.megatron.distributed.adapter_source import open_adapter_source

            return open_adapter_source(files.version, files.tensors, options)
        options = with_verl_config(files.version, options)
        if options.config is not None:
            require_agreement_beside(files.version, options.config)
        source, ckpt_format = open_dist(files, options), files.backend
        options = with_config_beside(files.version, source.args, options)
    else:
        source = open_ranks(path, options, legacy=False)
    names = [name for chunks in source.ranks.weights.values() for chunk in chunks for name in chunk]
    has_plain_norms = plain_norms.is_asked(options.extra, source.args)
    if has_plain_norms:
        source = replace(source, args=plain_norms.without_centering(source.args))
    # If a language model has no norms before its sublayers, its names don't show the library of its layers. The names
    # of a vision encoder do.
    beside = [name for held in source.ranks.beside.values() for name in held]
    naming = _with_indexer(naming_of([*names, *beside]), names, source.args, options.extra)
    described = f"core, {ckpt_format} format" + (
        "" if distributed else f", {describe_naming(naming)}"
    )
    described += f" of {source.writer}" if source.writer else ""
    naming = _with_out_norm(
        naming, names, source.args, options.extra.get("out_norm"), distributed=distributed
    )
    spellings = Spellings(CORE_SIZE_TENSORS, naming, described)
    opened = open_model(source, options, spellings, by_args=distributed)
    return plain_norms.with_plain_norms(opened) if has_plain_norms else opened


def _with_indexer(
    naming: Naming, names: Collection[str], args: Namespace, asked: Mapping[str, str]
) -> Naming:
    """The naming scheme of a model with indexers. Raises UsageError.

    If latent norms are separate modules, names don't show the library of the layers. The checkpoint's args then
    decide.
    """
    rope_last = reads_rope_last(args, names, asked)
    if rope_last:
        setattr(args, INDEXER_ORDER, ROPE_LAST)
    elif hasattr(args, INDEXER_ORDER):
        delattr(args, INDEXER_ORDER)
    if not any(".indexer." in name for name in names):
        return naming
    if getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine":
        naming = Naming(
            naming.scheme, tuple(variant for variant in naming.variants if variant != "local")
        )
    return with_rope_last(naming) if rope_last else naming


def _with_out_norm(
    naming: Naming, names: Collection[str], args: Namespace, asked: str | None, *, distributed: bool
) -> Naming:
    """The naming scheme of a model with out_norm weights.

    In a distributed checkpoint, the names don't say how out_norm is stored. Raises UsageError if its args don't say so
    either.
    """
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


LOADER = Loader(
    name="core",
    description="Megatron core: torch (mp_rank_*/model_optim_rng.pt), torch_dist (*.distcp), zarr; Megatron-Bridge, NeMo 2",
    detect=detect,
    open=open,
    options={
        "out_norm": "the form of a gated delta net's out_norm.weight: `plain` (Megatron's local layers, transformers), or `zero_centered` "
        "(Transformer Engine's layers: less 1); default: as the checkpoint's transformer_impl requires",
        INDEXER_FROM: "the release of Megatron core that wrote the indexers of sparse attention: `0.16` (0.16 to 0.18, "
        "rotary elements last), or `0.19` (0.19 and later); default: the release that the checkpoint names, else 0.19",
        plain_norms.OPTION: "`plain`: read norms that multiply by their weight + 1 (--apply-layernorm-1p) as plain norms, for a class "
        "without such norms (Llama)",
        LORA_ALPHA: "the alpha of a Megatron-Bridge adapter without a run_config.yaml",
    },
    reads_files=False,
    has_text_only=True,
)
