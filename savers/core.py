"""Megatron core in `torch` format (a directory for every rank), `torch_dist` or `zarr`; the tracker, and `hf/` for the rest."""

import logging
from dataclasses import replace
from functools import partial

from megaconv.engine.plan import OutputPlan
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.families.parts.whole_model import whole_notices
from megaconv.megatron.arguments.provider_fields import NOT_IN_CORE
from megaconv.megatron.arguments.rope import has_yarn
from megaconv.megatron.arguments.sparse import INDEXER_FOR, writes_rope_last
from megaconv.megatron.distributed.bridge_files import ADAPTER_KIND, BRIDGE, FOR, FUSED, is_for_bridge
from megaconv.megatron.rank_files.plan import ModelStyle, check_options, choose_layout, plan_ranks
from megaconv.megatron.states.names import core_order, extra_states
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Source
from megaconv.model.layout import Layout
from megaconv.model.naming import TRANSFORMER_IMPLS, core_naming
from megaconv.model.sharding import rank_sizes
from megaconv.options import LAYOUT_OPTIONS, SaveOptions

DESCRIPTION = "Megatron core, torch, torch_dist or zarr format (--ckpt-format), at any parallel layout"

_log = logging.getLogger("megaconv")

OPTIONS = {
    INDEXER_FOR: "which Megatron core is to compute with the indexers of sparse attention: `0.16` (to 0.18, which have the elements "
    "that rotate last), or `0.19` (and later; if it isn't given)",
    FOR: f"`{BRIDGE}`: torch_dist with the run_config.yaml from which Megatron-Bridge builds the model; Megatron-LM loads it as well",
    ADAPTER_KIND: f"of an adapter: `{FUSED}` for Megatron-Bridge's LoRA, where the adapter has an A for each part of a fused layer "
    "(left out: its CanonicalLoRA)",
}
HOLDS_OPTIMIZER = True
HOLDS_SHIFTED = True
HOLDS_ADAPTER = True
HOLDS_WHOLE = True
DISTRIBUTED = ("torch_dist", "zarr")


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that choose something."""
    files = ("files",) if options.ckpt_format == "torch_dist" else ()
    return (*LAYOUT_OPTIONS, "ep", "etp", "transformer_impl", "grouped_experts", "ckpt_format", *files)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """Raises LayoutError for a model that can't be sharded this way, NotExpressible for what Megatron doesn't support."""
    _check(header.config, options)
    if header.config.head.activation and "activation" in options.allow_lossy:
        header = replace(header, config=changed(header.config, {"head.activation": "gelu"}))
    if header.config.has("mamba_layers mixture") and options.transformer_impl == "transformer_engine":
        options = replace(options, grouped_experts=True)  # Megatron core's stack of such layers has no others
    layout = choose_layout(header.config, header.layout, options)
    if header.adapter is not None:
        from megaconv.megatron.distributed.adapter_plan import plan_adapter

        return plan_adapter(header, header.adapter, options, layout)
    if options.ckpt_format in DISTRIBUTED:
        from megaconv.megatron.distributed.plan import plan_dist  # rank files need nothing of it

        planned = plan_dist(header, options, layout)
    else:
        naming = core_naming(
            options.transformer_impl,
            "grouped" if options.grouped_experts else "",
            rope_last=writes_rope_last(header.config, options.extra),
        )
        style = ModelStyle(
            naming, core_order(family(header.config.family).rows, naming), partial(extra_states, naming=naming)
        )
        planned = plan_ranks(header, options, layout, style, transformer_impl=options.transformer_impl)
    if FOR not in options.extra:
        _warn_of_scaling(header.config)
    if layout.tp > header.config.attention.kv_heads:
        _log.warning(
            "kv_heads = %d, fewer than tp = %d: several tensor ranks share a key/value head, which Megatron core supports from 0.16 on",
            header.config.attention.kv_heads,
            layout.tp,
        )
    if header.config.embedding_scale is not None:
        _log.warning(
            "the embedding is scaled by %.6g: Megatron core's GPTModel doesn't do that; build the model as Megatron-Bridge and NeMo do",
            header.config.embedding_scale,
        )
    table = family(header.config.family)
    whole = whole_notices(header.config.whole)
    notices = (
        *planned.notices,
        *_modules_of_others(header.config),
        *_head_of_legacy(header.config),
        *table.notices(header.config),
        *whole,
    )
    return replace(planned, notices=notices)


def _modules_of_others(config: ModelConfig) -> tuple[str, ...]:
    lacking = [what for feature, what in NOT_IN_CORE.items() if config.has(feature)]
    if not lacking:
        return ()
    built = "the model has to be built with Megatron-Bridge's or others; names in the checkpoint are Megatron-Bridge's"
    return (f"Megatron core has no modules for {', '.join(lacking)}: {built}",)


def _head_of_legacy(config: ModelConfig) -> tuple[str, ...]:
    if not config.has("pooler !binary_head"):
        return ()
    what = "classification" if config.has("classification_head") else "multiple-choice"
    return (
        f"Megatron core's BERT has no {what} head: these files are for megatron-lite, and to be converted; "
        "--saver legacy writes those of Megatron-LM's tasks",
    )


def fit_adapter(source: Source, options: SaveOptions) -> Source:
    """An adapter as Megatron-Bridge can have it. Raises NotExpressible where it can't, LayoutError, UsageError."""
    from megaconv.megatron.distributed.adapter_fit import EXPERT_RANKS, fitted

    header = source.header
    _check(header.config, options)
    if options.etp not in (None, EXPERT_RANKS):
        raise UsageError(
            f"--etp {options.etp}: Megatron-Bridge has no adapters of experts on several tensor ranks; leave it out"
        )
    layout = choose_layout(header.config, header.layout, options)
    return fitted(source, tp=layout.tp, grouped=options.grouped_experts, kind=options.extra.get(ADAPTER_KIND))


def refuse(config: ModelConfig, options: SaveOptions, *, has_layout: bool) -> None:
    """Raises LayoutError for sizes asked for that the model can't be sharded to. has_layout: whether the input has one,
    so that what isn't asked for is not known yet."""
    asked = Layout(tp=options.tp or 1, ep=options.ep or 1, etp=options.etp or 1)
    rank_sizes(config, asked if has_layout else choose_layout(config, None, options), shares_heads=True)


def _check(config: ModelConfig, options: SaveOptions) -> None:
    if options.grouped_experts and not config.experts.count:
        raise UsageError("--moe-grouped-gemm: chooses nothing, since the model has no experts; leave it out")
    if options.transformer_impl not in TRANSFORMER_IMPLS:
        raise UsageError(
            f"transformer_impl {options.transformer_impl!r} is not known; choose one of {', '.join(TRANSFORMER_IMPLS)}"
        )
    if options.grouped_experts and options.transformer_impl != "transformer_engine":
        raise UsageError("grouped experts are a layer of Transformer Engine; leave --transformer-impl local out")
    check_options(options, ("torch", *DISTRIBUTED))
    is_for_bridge(options)


def _warn_of_scaling(config: ModelConfig) -> None:
    """Megatron-LM's own training script hands none of these on to the model; ours and the checkpoint are right."""
    scaling = config.positions.scaling or {}
    if scaling.get("rope_type") == "llama3" and scaling["factor"] != 8:
        _log.warning(
            "rope is scaled by %s: Megatron-LM's scripts up to core 0.18 use 8 whatever the checkpoint says",
            scaling["factor"],
        )
    if scaling.get("rope_type") == "linear":
        _log.warning("positions are scaled linearly: Megatron-LM's scripts up to core 0.18 ignore that for core models")
    if has_yarn(config):
        _log.warning(
            "positions are scaled by yarn: GPTModel of core 0.16 looks for yarn_* in its configuration, where Megatron-LM's training "
            "script puts none; set them there from the checkpoint's args of these names"
        )
