"""Translates between Megatron's arguments of hybrids with Mamba layers, and configuration and layout.

    hybrid_override_pattern     a symbol per layer (megaconv/model/pattern.py); a checkpoint's tensors show it
    hybrid_layer_pattern        the same from core 0.17 on, which may have `|` between pipeline stages, and `/` before MTP layers
    mamba_num_heads, mamba_head_dim, mamba_num_groups, mamba_state_dim
    megaconv_least_time_step    megaconv's own argument for a run that limits time steps as transformers does; Megatron has no limit
    spec                        the module of the layers: Megatron-LM's script builds no such model without one

Up to core 0.16 all stages have equal sizes, or all except the first and the last. Other stages, and virtual stages, are
written in hybrid_layer_pattern, so that core 0.17 and newer read them. Source: mamba_block.py and mamba_builders.py of
core 0.16.1, hybrid_layer_allocation.py and arguments.py of Megatron-LM at d98e8a64ddf3.
"""

from argparse import Namespace
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import family
from megaconv.megatron.arguments.beyond_core import positive_number
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.layout import Layout, split_arguments
from megaconv.model.pattern import has_pattern, pattern_of
from megaconv.model.predicting import HYBRID_MTP

LEAST_TIME_STEP = "megaconv_least_time_step"
_SIZES = {
    "mamba_num_heads": "mamba.heads",
    "mamba_head_dim": "mamba.head_dim",
    "mamba_num_groups": "mamba.groups",
    "mamba_state_dim": "mamba.state",
}
NEEDED_OF_MAMBA = {"mamba.groups": "mamba_num_groups", "mamba.state": "mamba_state_dim"}
"""Fields that tensors don't show -> the argument that gives them."""
PATTERNS = ("hybrid_override_pattern", "hybrid_layer_pattern")
"""The arguments that list the layers of a hybrid."""
EPSILON = 1e-5
"""The epsilon of the norm after the gate in Megatron, whatever --norm-epsilon is."""
_BY_PATTERN = {
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
}


def mamba_arguments(
    config: ModelConfig, layout: Layout, *, beside_config: bool = False
) -> dict[str, Any]:
    """All arguments of hybrids; empty for other models.

    beside_config: True if a config.json beside the checkpoint describes the layers too. Otherwise, raises
    NotExpressible for layers without a symbol, and for mixers with another epsilon than Megatron's.
    """
    sizes = {name: value_of(config, field) for name, field in _SIZES.items()}
    given = sizes if config.has("mamba_layers") else {}
    if not config.has("hybrid_stack"):
        return given  # of layers with attention too, which only the trainer saves
    own_epsilon = has_own_epsilon(config)
    if beside_config and (own_epsilon or not has_pattern(config)):
        return given
    if own_epsilon:
        raise NotExpressible(_epsilon_refused(mixer_epsilon(config)))
    return given | _pattern_arguments(config, layout)


def has_own_epsilon(config: ModelConfig) -> bool:
    """True if the norm after the gate of a Mamba 2 has another epsilon than in Megatron."""
    return config.has("mamba_layers") and mixer_epsilon(config) != EPSILON


def mixer_epsilon(config: ModelConfig) -> float:
    """The epsilon of the norm after the gate: its own, or that of the family, or that of all norms of the model."""
    if config.mamba.out_epsilon is not None:
        return config.mamba.out_epsilon
    fixed: float = family(config.family).fixed.get("norm.epsilon", config.norm.epsilon)
    return fixed


def _epsilon_refused(epsilon: float) -> str:
    return f"the norm inside the model's Mamba 2 has the epsilon {epsilon}; in Megatron it always has {EPSILON}"


def _pattern_arguments(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    pattern, split = pattern_of(config), split_arguments(layout)
    predicting = f"/{HYBRID_MTP}" * config.mtp_layers
    listed = split["pipeline_model_parallel_layout"] is not None or layout.vpp > 1
    return {
        "is_hybrid_model": True,
        "hybrid_override_pattern": pattern,
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
        **_unified_pattern(pattern, layout, predicting, listed=listed),
    }


def _unified_pattern(
    pattern: str, layout: Layout, predicting: str, *, listed: bool
) -> dict[str, Any]:
    """The pattern for core 0.17 and later. Earlier releases have no MTP layers in such a model, and get no pattern then."""
    if not listed and not predicting:
        return {}
    main = _with_stages(pattern, layout) if listed else pattern
    found: dict[str, Any] = {"hybrid_layer_pattern": main + predicting}
    if predicting:
        found["hybrid_override_pattern"] = None
    return found | (_BY_PATTERN if listed else {})


def _with_stages(pattern: str, layout: Layout) -> str:
    return "|".join(
        pattern[chunk.first_layer : chunk.first_layer + chunk.layers] for chunk in layout.chunks()
    )


def read_mamba(args: Namespace, epsilon: float | None) -> dict[str, Any]:
    """The fields of Mamba layers. A size that the arguments lack has no field.

    epsilon: of all other norms. Megatron's own hybrids, which the arguments describe by a pattern, have EPSILON in the
    mixers. A run of megatron_lite that has another one there writes no pattern.
    """
    found = {field: getattr(args, name, None) for name, field in _SIZES.items()}
    sizes = {field: value for field, value in found.items() if value is not None}
    has_pattern = any(getattr(args, name, None) for name in PATTERNS)
    if has_pattern and epsilon not in (None, EPSILON):
        sizes["mamba.out_epsilon"] = EPSILON
    return sizes | {"mamba.least_time_step": positive_number(args, LEAST_TIME_STEP)}


def time_step_argument(config: ModelConfig) -> dict[str, Any]:
    """The argument for a run with a limit on time steps; otherwise empty. Megatron doesn't read it."""
    least = config.mamba.least_time_step
    return {} if least is None or not config.has("mamba_layers") else {LEAST_TIME_STEP: least}


def stages_of(args: Namespace) -> tuple[int, ...] | None:
    """The layers of each stage in hybrid_layer_pattern, in the order of the model; None if it doesn't list stages."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if not isinstance(pattern, str) or "|" not in pattern:
        return None
    return tuple(map(len, pattern.partition("/")[0].split("|")))
