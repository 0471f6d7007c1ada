"""Megatron's models before core in `torch` format, as releases from core 0.8 on write them with --use-legacy-models."""

import logging

from megaconv.engine.plan import OutputPlan
from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import family
from megaconv.megatron.arguments.expressible import require_names
from megaconv.megatron.rank_files.output_layout import choose_layout
from megaconv.megatron.rank_files.plan import ModelStyle, check_options, plan_ranks
from megaconv.megatron.states.legacy_names import (
    legacy_extra_states,
    legacy_order,
    nest,
    nest_with_poolers,
)
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header
from megaconv.model.layout import Layout
from megaconv.model.naming import LEGACY
from megaconv.options import LAYOUT_OPTIONS, SaveOptions
from megaconv.saver import Saver

_log = logging.getLogger("megaconv")


def uses(options: SaveOptions) -> tuple[str, ...]:
    """Fields of the options that this saver uses. ep and transformer_impl are accepted or refused as Megatron-LM's
    saver does."""
    return (*LAYOUT_OPTIONS, "ep", "etp", "transformer_impl")


def plan(header: Header, options: SaveOptions) -> OutputPlan:
    """The plan of an output.

    Raises LayoutError for a model that can't be sharded this way, and NotExpressible for features that these models
    don't have.
    """
    check_options(options)
    _require_expressible(header.config)
    layout = choose_layout(header.config, header.layout, options, uneven=False)
    _require_even(layout)
    _require_whole_biencoder(header.config, layout)
    order = legacy_order(family(header.config.family).rows)
    nested = nest_with_poolers if header.config.retriever.pooler else nest
    style = ModelStyle(LEGACY, order, legacy_extra_states, nested, legacy=True)
    planned = plan_ranks(header, options, layout, style, transformer_impl="local")
    _warn_of_rope(header.config)
    return planned


def _require_expressible(config: ModelConfig) -> None:
    require_names(config)
    lacking = {
        "norms on q and k": config.attention.qk_norm,
        "a sliding window": config.window,
        "experts, which we write for Megatron core only": config.experts.count,
    }
    for what, has in lacking.items():
        if has:
            raise NotExpressible(
                f"Megatron's legacy models can't represent this model: it has {what}; choose --saver core"
            )


def _require_even(layout: Layout) -> None:
    """Raise LayoutError for an uneven layout. Source: _get_num_layers in megatron/legacy/model/transformer.py."""
    stages = layout.stage_layers[layout.split_rank :]
    if len(set(stages)) > 1:
        raise LayoutError(
            f"Megatron's legacy models have as many layers on every stage, not {'+'.join(map(str, stages))}; "
            "choose a pipeline parallel size (pp, and vpp) that divides them, without a layer split"
        )


def _require_whole_biencoder(config: ModelConfig, layout: Layout) -> None:
    """Raise LayoutError for a sharded biencoder. Source: pretrain_ict.py and biencoder_model_provider of Megatron-LM."""
    if config.has("retriever") and (layout.tp, layout.pp) != (1, 1):
        raise LayoutError(
            "Megatron's biencoders have tensor and pipeline parallel size 1 only; "
            "choose --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1, or --saver core"
        )


def _warn_of_rope(config: ModelConfig) -> None:
    """Warn if the model's rope differs from that of the legacy models, whose code uses only rotary_percent and a linear
    scaling.

    The checkpoint itself is right.
    """
    if config.positions.kind == "rope" and config.positions.theta != 10000:
        _log.warning(
            "rope theta is %g, but Megatron's legacy models always use 10000",
            config.positions.theta,
        )
    if (config.positions.scaling or {}).get("rope_type") == "llama3":
        _log.warning("rope is scaled: Megatron's legacy models ignore that")


SAVER = Saver(
    name="legacy",
    description="Megatron before core, torch format, checkpoint version 3, at any even layout",
    plan=plan,
    uses=uses,
    holds_optimizer=True,
)
