"""Model features that Megatron core computes only with other projects' modules, as Megatron-Bridge's arguments.

    rotary_base                     a pair: of layers with a window, and of all others (Gemma 3)
    attn_logit_softcapping          tanh cap on attention scores (Gemma 2)
    final_logit_softcapping         tanh cap on logits (Gemma 2)
    query_pre_attn_scalar           one over the square of attention's scale (Gemma 2), beside core's own softmax_scale

Megatron-Bridge selects norms after sublayers, and norms over all heads, by the model's provider. In a checkpoint, the
tensors show these norms. If a rank has only one head, the tensors don't show the width of the norms of q and k;
megaconv then writes its own argument. It also writes one for the last tokens that a head has no rows for (Molmo 2), since
Megatron's head has rows for all tokens. Source: gemma2_provider.py, gemma3_provider.py and minimax_m2_provider.py
of Megatron-Bridge.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family, family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of

OF_THE_TRAINER = (
    *("layers_differ", "shared_kv", "keys_as_values", "v_norm", "layer_scale"),
    *("expert_norms", "layer_inputs", "window_sinks", "value_width", "value_scale"),
    *("two_rotations", "parts_left_out", "xielu", "head_gate", "softplus_gate", "kda_layers"),
    *("limits", "side_by_side", "gate_bias", "depth_residuals", "differential"),
    *("skipped_norm", "head_projection"),
)
"""Features that no software of Megatron loads from a checkpoint. The trainer's checkpoints have them in a config.json."""
QK_NORM_WIDTH = "megaconv_qk_norm_width"
UNPREDICTED = "megaconv_unpredicted_tokens"

_CAPS = {
    "attn_logit_softcapping": "attention.score_cap",
    "final_logit_softcapping": "head.logit_cap",
}
_ARGUMENTS = {
    **{field: name for name, field in _CAPS.items()},
    "positions.local_theta": "rotary_base as a pair",
    "head.unpredicted": UNPREDICTED,
}


def is_of_the_trainer(config: ModelConfig) -> bool:
    """True if only the trainer's own checkpoints can hold a model in Megatron's format."""
    return any(config.has(feature) for feature in OF_THE_TRAINER)


def beyond_core_arguments(config: ModelConfig, *, legacy: bool) -> dict[str, Any]:
    """The arguments for these features. Raises NotExpressible.

    A family that may have caps gets their arguments even for a model without caps.
    """
    needed = family(config.family).beyond_core
    positions = config.positions
    scale = config.attention.scale
    written = {
        name: value_of(config, field)
        for name, field in _CAPS.items()
        if field in needed or value_of(config, field) is not None
    }
    if config.head.unpredicted or "head.unpredicted" in needed:
        written[UNPREDICTED] = config.head.unpredicted
    if positions.local_theta is not None:
        written["rotary_base"] = (positions.local_theta, positions.theta)
    if scale is not None:
        written["softmax_scale"] = scale
    if (legacy and written) or (scale is not None and config.latent.kv_rank):
        models = "legacy models" if legacy else "latent attention"
        raise NotExpressible(
            f"the model needs {written}, which is not representable in Megatron's {models}"
        )
    if "attn_logit_softcapping" in written:
        written["query_pre_attn_scalar"] = (
            config.attention.head_dim if scale is None else round(scale**-2, 9)
        )
    return written | ({QK_NORM_WIDTH: "all"} if config.has("wide_qk_norm") else {})


def read_beyond_core(args: Namespace, head_dim: int) -> dict[str, Any]:
    """These features as fields of the configuration, except for rope."""
    given: dict[str, Any] = {
        field: positive_number(args, name) for name, field in _CAPS.items() if hasattr(args, name)
    }
    scale = positive_number(args, "softmax_scale")
    scalar = positive_number(args, "query_pre_attn_scalar")
    if scale is None and scalar is not None:
        scale = scalar**-0.5
    if scale is not None and not getattr(args, "multi_latent_attention", False):
        # Latent attention has its own scale.
        given["attention.scale"] = None if scale == head_dim**-0.5 else scale
    unpredicted = getattr(args, UNPREDICTED, None)
    if unpredicted is not None:
        given["head.unpredicted"] = unpredicted
    return given | (
        {"attention.qk_norm_width": "all"} if getattr(args, QK_NORM_WIDTH, None) == "all" else {}
    )


def positive_number(args: Namespace, name: str) -> Any:
    """A numeric argument; None if it is missing. Raises CorruptCheckpoint unless it is positive."""
    value = getattr(args, name, None)
    if value is not None and (type(value) not in (int, float) or not value > 0):
        raise CorruptCheckpoint(
            f"the checkpoint's {name} should be a positive number, found {value!r:.100}"
        )
    return value


def require_beyond_core(given: Mapping[str, Any], member: Family) -> None:
    """Raises CorruptCheckpoint for a missing field that must not be guessed."""
    for field in member.beyond_core:
        if field not in given:
            raise CorruptCheckpoint(
                f"the checkpoint is of a {member.name}, and its args don't say {_ARGUMENTS[field]}; "
                "give --config with the Hugging Face directory of the model"
            )
