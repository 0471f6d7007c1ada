"""Routers that Megatron's arguments can't describe: the refusals, and megaconv's own arguments for the trainer's runs.

    megaconv_renormalized_experts     a sigmoid router whose weights are summed up to 1 otherwise than Megatron does it
    megaconv_bias_on_logits           a sigmoid router that adds its bias to logits, not to their sigmoids (Kolibri 1)

Megatron makes the weights of several experts sum up to 1, and leaves that of a single expert as it is. Source:
topk_routing_with_score_function of megatron/core/transformer/moe/moe_utils.py.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.model.subjects import RANKED_BY, Experts

RENORMALIZED = "megaconv_renormalized_experts"
BIAS_ON_LOGITS = "megaconv_bias_on_logits"
_FIELDS = {RENORMALIZED: "experts.renormalize", BIAS_ON_LOGITS: "experts.bias_on_logits"}


def router_refusals(experts: Experts, *, beside_config: bool) -> Iterator[tuple[bool, str]]:
    """(whether a problem applies, why Megatron doesn't have this router) for each possible problem.

    beside_config: True for a trainer's own checkpoint, which has the arguments of `own_router_arguments`.
    """
    yield (
        not beside_config and _sums_otherwise(experts),
        "Megatron's sigmoid router makes the weights of several experts sum up to 1, and leaves that of a single one as it is; "
        f"this model's, with {experts.per_token} a token, has experts.renormalize = {experts.renormalize}",
    )
    yield (
        not beside_config and experts.bias_on_logits,
        "Megatron's sigmoid router adds its bias to the sigmoids of logits; this model's adds it to the logits "
        "(experts.bias_on_logits = True)",
    )
    yield (
        experts.probs_on_input and experts.per_token > 1,
        f"the model scales the input of {experts.per_token} experts a token; Megatron (moe_apply_probs_on_input) that of one",
    )
    has_groups = (experts.groups or 1) > 1
    ranked_by_in_megatron = experts.per_token // (experts.group_topk or 1)
    yield (
        has_groups and ranked_by_in_megatron != RANKED_BY,
        f"Megatron ranks a group by its experts_per_token // router_group_topk best experts, this model by its best {RANKED_BY}: "
        f"{experts.per_token} experts of {experts.group_topk} groups aren't {RANKED_BY} of each",
    )


def own_router_arguments(experts: Experts) -> dict[str, Any]:
    """The arguments for a router that Megatron doesn't have; otherwise empty. Megatron doesn't read them."""
    written: dict[str, Any] = {}
    if _sums_otherwise(experts):
        written[RENORMALIZED] = experts.renormalize
    if experts.bias_on_logits:
        written[BIAS_ON_LOGITS] = True
    return written


def read_own_router(args: Namespace) -> dict[str, Any]:
    """The fields that these arguments give. Raises CorruptCheckpoint unless they are true or false."""
    given = {}
    for name, field in _FIELDS.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if type(value) is not bool:
            raise CorruptCheckpoint(
                f"the checkpoint's {name} should be true or false, found {value!r:.100}"
            )
        given[field] = value
    return given


def _sums_otherwise(experts: Experts) -> bool:
    sums_in_megatron = experts.per_token > 1
    return experts.score == "sigmoid" and experts.renormalize != sums_in_megatron
