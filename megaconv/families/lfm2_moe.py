"""LFM 2 with experts (8B-A1B): LFM 2's layers, with experts chosen by sigmoids and a bias after the first dense layers."""

from collections.abc import Sequence
from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families.lfm2 import ALIASES, ENDS, FIXED, MIXERS, MLP, SHARED_KEYS, WORDS
from megaconv.families.lfm2 import FAMILY as LFM2
from megaconv.families.parts.deepseek_experts import ROUTER_BIAS, first_dense, routed_experts
from megaconv.families.parts.experts import MOE_NORM, expert_rows
from megaconv.families.parts.keys import CONFIG_NAME, Raw, factor, flags, size
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.model.table import Spelling, Stacked

_EXPERT = "feed_forward.experts.{e}."
_STACKED = "model.layers.{l}.feed_forward.experts."
_OF_TRANSFORMERS: dict[str, dict[str, Spelling]] = {
    "layers.{l}.mlp.router.weight": {"hf_stacked": "model.layers.{l}.feed_forward.gate.weight"},
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": {"hf_stacked": Stacked(_STACKED + "gate_up_proj")},
    "layers.{l}.mlp.experts.{e}.down.weight": {"hf_stacked": Stacked(_STACKED + "down_proj")},
}  # fmt: skip
"""Names of experts in one tensor, as in the memory of transformers."""
_EXPERTS = respelled(
    expert_rows("feed_forward.gate.weight", _EXPERT + "{w1|w3}.weight", _EXPERT + "w2.weight"),
    _OF_TRANSFORMERS,
)
_MOE = (
    MOE_NORM.renamed(hf="model.layers.{l}.ffn_norm.weight"),
    *_EXPERTS,
    ROUTER_BIAS.renamed(hf="model.layers.{l}.feed_forward.expert_bias"),
)
ROWS = (*ENDS[:1], *MIXERS, *in_core((*MLP, *_MOE)), *ENDS[1:])


def _require_words(_: Raw, layers: int) -> Sequence[str]:
    raise CorruptCheckpoint(
        f"{CONFIG_NAME}: layer_types should list the {layers} layers, found none; add it as the model's authors have it"
    )


_KEYS = (
    size("hidden_size", "hidden", 2048),
    *SHARED_KEYS,
    size("intermediate_size", "mlp.ffn", 7168),
    layer_mixers(WORDS, _require_words, layers=32),
    *routed_experts(count=32, per_token=4, width=1792, count_key="num_experts"),
    first_dense(2, key="num_dense_layers", layers=32),
    flags("use_expert_bias", ("experts.router_bias",), default=True),
    flags("norm_topk_prob", ("experts.renormalize",), default=True),
    factor("routed_scaling_factor", "experts.scale"),
)
_NAMES = {"tie_embedding": ALIASES["tie_embedding"]}

FAMILY = replace(
    LFM2, name="lfm2_moe", architectures=("Lfm2MoeForCausalLM",), model_type="lfm2_moe", rows=ROWS, keys=_KEYS,
    fixed={**FIXED, "experts.score": "sigmoid"}, aliases=_NAMES,
)  # fmt: skip
