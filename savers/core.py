"""Megatron core in `torch` format (one directory per rank), `torch_dist` or `zarr`, with the tracker, and `hf/` for
other files."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from megaconv.engine.plan import OutputPlan
from megaconv.errors import UsageError
from megaconv.families import family
from megaconv.megatron.arguments.expressible import require_names
from megaconv.megatron.arguments.notices import core_notices, embedding_notices, script_notices
from megaconv.megatron.arguments.sparse import INDEXER_FOR, writes_rope_last
from megaconv.megatron.distributed.bridge_files import (
    ADAPTER_KIND,
    FUSED,
)
from megaconv.megatron.rank_files.output_layout import choose_layout
from megaconv.megatron.rank_files.plan import ModelStyle, check_options, plan_ranks
from megaconv.megatron.states.hybrid_form import GPT, HYBRID, MODEL, hybrid_name, writes_hybrid
from megaconv.megatron.states.names import core_order, extra_states
from megaconv.megatron.states.recipient import BRIDGE, FOR, is_for_bridge
from megaconv.megatron.states.releases import (
    FOR_RELEASE,
    RELEASES,
    names_for,
    order_for,
    release_for,
    release_notices,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.ir import Header, Source
from megaconv.model.layout import Layout
from megaconv.model.naming import TRANSFORMER_IMPLS, core_naming
from megaconv.model.sharding import rank_sizes
from megaconv.options import LAYOUT_OPTIONS, SaveOptions
from megaconv.saver import Saver

_log = logging.getLogger("megaconv")

DISTRIBUTED = ("torch_dist", "zarr")


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses."""
    own = ("ep", "etp", "transformer_impl", "grouped_experts", "ckpt_format")
    files = ("files",) if options.ckpt_format == "torch_dist" else ()
    return (*LAYOUT_OPTIONS, *own, *files)


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output. Raises LayoutError for a model that can't be sharded this way, and NotExpressible for
    unsupported features."""
    config = header.config
    _check(config, options)
    if config.head.activation and "activation" in options.allow_lossy:
        config = changed(config, {"head.activation": "gelu"})
        header = replace(header, config=config)
    hybrid = writes_hybrid(options.extra, header.training.arguments)
    in_stack = config.has("mixture") and (hybrid or config.has("hybrid_stack"))
    if in_stack and options.transformer_impl == "transformer_engine":
        # Megatron core's hybrid stack has no other experts.
        options = replace(options, grouped_experts=True)
    layout = choose_layout(config, header.layout, options)
    if header.adapter is not None:
        if options.extra.get(MODEL) == HYBRID:
            raise UsageError(
                f"--option {MODEL}={HYBRID}: an adapter is for Megatron-Bridge, which builds its model as GPTModel; leave the option out"
            )
        from megaconv.megatron.distributed.adapter_plan import plan_adapter

        return plan_adapter(header, header.adapter, options, layout)
    if options.ckpt_format in DISTRIBUTED:
        # Rank files don't need this module.
        from megaconv.megatron.distributed.plan import plan_dist

        planned = plan_dist(header, options, layout)
    else:
        release = release_for(options.extra, header.training.arguments, config)
        style = _style(config, options, release, hybrid=hybrid)
        implementation = options.transformer_impl
        planned = plan_ranks(header, options, layout, style, transformer_impl=implementation)
        _warn(() if hybrid else release_notices(config, release))
    if FOR not in options.extra:
        _warn((*script_notices(config), *embedding_notices(config)))
    if layout.tp > config.attention.kv_heads:
        _log.warning(
            "kv_heads = %d, fewer than tp = %d: several tensor ranks share a key/value head, which Megatron core supports from 0.16 on",
            config.attention.kv_heads,
            layout.tp,
        )
    return replace(planned, notices=(*planned.notices, *core_notices(config)))


def _style(config: ModelConfig, options: SaveOptions, release: str, *, hybrid: bool) -> ModelStyle:
    """The names, their order and the extra states in rank files of a release of Megatron core.

    hybrid: True for the form of a HybridModel.
    """
    naming = core_naming(
        options.transformer_impl,
        "grouped" if options.grouped_experts else "",
        rope_last=writes_rope_last(config, options.extra),
    )
    order = order_for(release, core_order(family(config.family).rows, naming))
    states = partial(extra_states, naming=naming, has_scores=config.has("scores"))
    renamed = hybrid_name if hybrid else names_for(release)
    return ModelStyle(naming, order, states, renamed=renamed)


def _warn(notices: Iterable[str]) -> None:
    for notice in notices:
        _log.warning("%s", notice)


def fit_adapter(source: Source, options: SaveOptions) -> Source:
    """An adapter in a form that Megatron-Bridge supports. Raises NotExpressible if there is none, LayoutError and
    UsageError."""
    from megaconv.megatron.distributed.adapter_fit import EXPERT_RANKS, fitted

    header = source.header
    _check(header.config, options)
    if options.etp not in (None, EXPERT_RANKS):
        raise UsageError(
            f"--etp {options.etp}: Megatron-Bridge has no adapters of experts on several tensor ranks; leave it out"
        )
    layout = choose_layout(header.config, header.layout, options)
    return fitted(
        source, tp=layout.tp, grouped=options.grouped_experts, kind=options.extra.get(ADAPTER_KIND)
    )


def refuse(config: ModelConfig, options: SaveOptions, *, has_layout: bool) -> None:
    """Raise LayoutError for requested sizes that the model can't be sharded to, NotExpressible for a model without names.

    has_layout: True if the input has a layout. Sizes that are not requested are then not known yet.
    """
    require_names(config)  # no other sizes would help
    asked = Layout(tp=options.tp or 1, ep=options.ep or 1, etp=options.etp or 1)
    rank_sizes(
        config, asked if has_layout else choose_layout(config, None, options), shares_heads=True
    )


def _check(config: ModelConfig, options: SaveOptions) -> None:
    require_names(config)
    if options.grouped_experts and not config.experts.count:
        raise UsageError(
            "--moe-grouped-gemm: has no effect, because the model has no experts; leave it out"
        )
    if options.transformer_impl not in TRANSFORMER_IMPLS:
        raise UsageError(
            f"transformer_impl {options.transformer_impl!r} is not known; choose one of {', '.join(TRANSFORMER_IMPLS)}"
        )
    if options.grouped_experts and options.transformer_impl != "transformer_engine":
        raise UsageError(
            "grouped experts are a layer of Transformer Engine; leave --transformer-impl local out"
        )
    check_options(options, ("torch", *DISTRIBUTED))
    if FOR_RELEASE in options.extra and options.ckpt_format in DISTRIBUTED:
        raise UsageError(
            f"--option {FOR_RELEASE}: has no effect, because the keys of {options.ckpt_format} are the same in all releases; leave it out"
        )
    if FOR_RELEASE in options.extra and options.extra.get(MODEL) == HYBRID:
        raise UsageError(
            f"--option {FOR_RELEASE}: has no effect with {MODEL}={HYBRID}, which is of core 0.19; leave it out"
        )
    if is_for_bridge(options) and options.extra.get(MODEL) == HYBRID:
        raise UsageError(
            f"--option {MODEL}={HYBRID}: Megatron-Bridge builds these models as GPTModel; leave one of both options out"
        )


SAVER = Saver(
    name="core",
    description="Megatron core, torch, torch_dist or zarr format (--ckpt-format), at any parallel layout",
    plan=plan,
    holds_scores=True,
    options={
        INDEXER_FOR: "the release of Megatron core that will compute the indexers of sparse attention: `0.16` (0.16 to 0.18, rotary "
        "elements last), or `0.19` (0.19 and later; the default)",
        FOR_RELEASE: f"the release of Megatron core that will load rank files (torch), whose names differ: {' or '.join(RELEASES)} "
        "(and later ones); default: the source's, else 0.16, or 0.17 for a hybrid with an MTP layer",
        MODEL: f"the class of Megatron core that loads the output: `{GPT}` (GPTModel), or `{HYBRID}` (HybridModel of core 0.19, which "
        "has a layer for each mixer and for each MLP); default: the source's, else GPTModel",
        FOR: f"`{BRIDGE}`: torch_dist with the run_config.yaml from which Megatron-Bridge builds the model; Megatron-LM loads it as well",
        ADAPTER_KIND: f"of an adapter: `{FUSED}` for Megatron-Bridge's LoRA, where the adapter has an A for each part of a fused layer "
        "(left out: its CanonicalLoRA)",
    },
    uses=uses,
    holds_optimizer=True,
    holds_adapter=True,
    holds_whole=True,
    holds_shifted=True,
    refuse=refuse,
    fit_adapter=fit_adapter,
)
