"""Whatever a config.json says, the trainer computes what transformers computes, or refuses the model with one clear error."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.trainer.parallel.changed_configurations import (
    BASES,
    Changes,
    Outcome,
    judge,
    single_changes,
)

pytestmark = pytest.mark.oracle

IN_GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    # Two experts of two groups: Megatron would rank the groups by their best expert.
    ("deepseek_v3", {"num_experts_per_tok": 2}),
    ("deepseek_v3", {"num_experts_per_tok": 3}),
    ("deepseek_v3", {"topk_group": 3}),
    ("deepseek_v3", {"topk_group": 4}),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1}),
    ("deepseek_v3", {"rms_norm_eps": 1e-2}),
    ("deepseek_v2", {"rms_norm_eps": 1e-2, "q_lora_rank": 24}),
    ("sarvam_mla", {"rms_norm_eps": 1e-2}),
    ("glm4_moe_lite", {"rms_norm_eps": 1e-2, "n_group": 2, "num_experts_per_tok": 1}),
    ("glm4_moe", IN_GROUPS),
    ("dots1", IN_GROUPS),
    ("solar_open", IN_GROUPS),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    ("gpt_oss", {"swiglu_limit": 1.7}),
    ("gemma3_text", {"query_pre_attn_scalar": 16}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("gpt2", {"activation_function": "gelu"}),
]
"""Changes with which both compute the same."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok"),
    ("deepseek_v3", {"num_experts_per_tok": 8}, "num_experts_per_tok"),
    ("deepseek_v3", {"n_group": 8}, "n_group"),
    ("glm4_moe", {"n_group": 3}, "n_group"),
    ("deepseek_v3", {"head_dim": 2}, "head_dim"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method"),
    ("llama", {"head_dim": 3}, "even"),
    ("stablelm", {"hidden_size": 16}, "even"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 5e3}},
        "longrope",
    ),
]
"""Changes that the trainer refuses -> a word of the message that says which."""


@pytest.mark.parametrize(("family", "changes"), COMPUTED, ids=str)
def test_a_changed_model_is_computed_as_transformers_computes_it(
    family: str, changes: Changes, tmp_path: Path
) -> None:
    found = judge(family, changes, tmp_path)
    assert found.kind == "same", found


@pytest.mark.parametrize(("family", "changes", "word"), REFUSED, ids=str)
def test_a_change_that_the_trainer_cannot_compute_is_refused_by_name(
    family: str, changes: Changes, word: str, tmp_path: Path
) -> None:
    found = judge(family, changes, tmp_path)
    assert found.kind == "refused"
    assert word in found.what


def judged_alone(family: str, changes: Changes) -> Outcome:
    """Nothing is left of the model: hundreds would fill a disk."""
    with TemporaryDirectory() as directory:
        return judge(family, changes, Path(directory))


def faults_of(family: str, listed: list[Changes]) -> dict[str, Outcome]:
    """The faulty outcomes by change. Requires that many changes are computed, because the grid would prove nothing
    without them."""
    judged = {str(dict(changes)): judged_alone(family, changes) for changes in listed}
    kinds = [outcome.kind for outcome in judged.values()]
    assert kinds.count("same") > len(kinds) / 5
    return {changes: outcome for changes, outcome in judged.items() if outcome.is_fault}


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_each_field_changed_alone_is_computed_alike_or_refused(family: str) -> None:
    assert faults_of(family, list(single_changes(family))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_two_fields_changed_at_once_are_computed_alike_or_refused(family: str) -> None:
    """The changes are those that are computed alone, since one refusal would hide the other."""
    draw = random.Random(family)
    changes = draw.sample(list(single_changes(family)), 60)
    alone = [change for change in changes if judged_alone(family, change).kind == "same"]
    pairs: list[Changes] = []
    for first in alone:
        second = draw.choice(alone)
        if first.keys() != second.keys():
            pairs.append({**first, **second})
    assert faults_of(family, pairs) == {}
