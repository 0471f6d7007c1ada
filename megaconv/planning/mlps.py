"""The elements that the MLP of a layer leaves for the backward pass: between its matrices, and in the rows of experts."""

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import MLP, LayerKind


def activation_parts(mlp: MLP, limit: float | None, *, weighted: bool = False) -> int:
    """Return how many times the width of an MLP its activation function keeps, without its result.

    limit: of a layer whose activated gates are limited. weighted: True if the result is multiplied by the weights of rows.
    """
    if mlp.is_plain_swiglu and limit is None:
        return 2  # one operation, which keeps its input alone
    has_sigmoid = mlp.activation == "quick_gelu"
    found = 1 + has_sigmoid + weighted
    if not mlp.gated:
        return found
    is_clamped = mlp.clamp is not None
    moves_second = is_clamped or mlp.offset != 0
    limits = 0 if limit is None else 2
    # The second projection and the activated gate, and each projection again where a limit or an offset changes it.
    return found + 2 + is_clamped + moves_second + limits


def row_elements(config: ModelConfig, kind: LayerKind, etp: int) -> float:
    """Return the elements that each row of a routed expert leaves on one of `etp` ranks, which share the rows of all."""
    experts, mlp = config.experts, config.mlp
    width = routed_width(config)
    weighted = not experts.probs_on_input
    whole = width * (1 + etp)
    if experts.probs_on_input:
        whole += width  # before the weights
    elif mlp.bias:
        whole += width  # the second bias, whose weights have a gradient
    inside = activation_parts(mlp, kind.limit, weighted=weighted) + 1
    return whole + experts.ffn * inside


def routed_width(config: ModelConfig) -> int:
    """Return the width of the rows that routed experts read and give."""
    return config.experts.latent or config.hidden
