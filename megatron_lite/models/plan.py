"""What all parts of a model are built from, and which models there is code for."""

from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import ProcessGroup

from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.sharding import rank_sizes
from megaconv.model.subjects import LayerKind
from megatron_lite.models import recompute
from megatron_lite.parallel.tensor import Keep, NormOptions, TensorGroup
from megatron_lite.settings.options import ModelOptions


class ExpertRanks(NamedTuple):
    """Whom a layer's tokens are handed to and come from; None: no other rank."""

    experts: ProcessGroup | None = None
    """The ranks that share the experts of each layer, in whose order these are counted."""
    parts: ProcessGroup | None = None
    """Those that share each expert."""


NO_OTHERS = ExpertRanks()


@dataclass(frozen=True)
class Plan:
    """What all parts of a model are built from."""

    config: ModelConfig
    options: ModelOptions
    ranks: TensorGroup
    sizes: dict[str, int]
    """This tensor rank's share of heads, kv_heads, ffn."""
    vocab_rows: int
    """Of the whole vocabulary, padding included."""
    expert_ranks: ExpertRanks = NO_OTHERS

    def kind(self, layer: int) -> LayerKind:
        """Of a layer; those that predict further tokens are counted behind all others, and are like the last of these."""
        return self.config.layers[min(layer, self.config.layer_count - 1)]

    @property
    def norm(self) -> NormOptions:
        norm = self.config.norm
        return NormOptions(norm.epsilon, norm.kind == "LayerNorm", norm.zero_centered)

    @property
    def norm_of_heads(self) -> NormOptions:
        """Of queries, keys and latents: without biases."""
        return self.norm._replace(with_bias=False)

    @property
    def norm_after(self) -> NormOptions | None:
        """Of what a sublayer gives, where that is normed too."""
        return self.norm if self.config.norm.place == "both" else None

    @property
    def keep(self) -> Keep:
        return recompute.make_again if self.options.recompute.granularity == "selective" else recompute.keep


TRAINED = (
    "arcee", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "gemma", "gemma3_text", "glm", "glm4_moe", "glm4_moe_lite",
    "gpt2", "gpt_oss", "hy_v3", "jais2", "llama", "mistral", "mixtral", "nemotron", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
)  # fmt: skip
"""Families that this decoder is, by configuration."""
NETWORKS_OF_THEIR_OWN = ("bert", "t5")
"""Families that it isn't: megatron_lite.models.networks."""
NOT_COMPUTED = {
    "indexer": "an indexer that chooses positions",
    "output_norm": "norms after its sublayers, not before them",
    "post_norm": "norms of the sums of each sublayer, as the original BERT: Megatron core has none",
    "wide_qk_norm": "norms of q and k over all heads",
    "qk_l2_norm": "q and k divided by their L2 norm",
    "capped_scores": "capped attention scores",
    "capped_logits": "capped logits",
    "expert_latent": "experts that work on a projection of the hidden states",
}
"""Features of a model that this decoder has no code for, whatever its family."""


def check_computed(config: ModelConfig) -> None:
    """Raises NotExpressible for what there is no code for."""
    for feature, what in NOT_COMPUTED.items():
        if config.has(feature):
            raise NotExpressible(f"the model has {what}, which can't be trained yet")


def make_plan(
    config: ModelConfig,
    layout: Layout,
    options: ModelOptions,
    ranks: TensorGroup,
    expert_ranks: ExpertRanks = NO_OTHERS,
) -> Plan:
    """Raises NotExpressible for a model that can't be trained, LayoutError for one that can't be sharded."""
    if config.family not in (*TRAINED, *NETWORKS_OF_THEIR_OWN):
        known = ", ".join(sorted((*TRAINED, *NETWORKS_OF_THEIR_OWN)))
        raise NotExpressible(f"a {config.family} can't be trained yet; models that can are {known}")
    if config.encoder.layers:
        _check_two_stacks(config)
    if options.fp8 is not None and config.family in NETWORKS_OF_THEIR_OWN:
        raise NotExpressible(f"--fp8-format is for decoders; a {config.family} is computed in bf16")
    check_computed(config)
    if config.mtp_layers and not any(row.stage == "mtp" for row in family(config.family).rows):
        raise NotExpressible(
            f"the model would be a {config.family} that predicts further tokens, for whose layers no checkpoint has names; these are for "
            "mixtures of experts as DeepSeek-V3 and GLM-4.5 (--moe-router-score-function sigmoid, --moe-router-enable-expert-bias)"
        )
    if config.mtp_layers and options.preference is not None:
        raise NotExpressible("the model predicts further tokens, which can't be trained on pairs of answers yet")
    rows = padded_vocab(config.vocab, options.vocab_divisor, layout.tp)
    if config.experts.count:
        _check_experts(config, layout, ranks, options)
    return Plan(config, options, ranks, rank_sizes(config, layout), rows, expert_ranks)


def _check_two_stacks(config: ModelConfig) -> None:
    if config.attention.scale is not None:
        raise NotExpressible(
            "the model is a T5 of transformers, whose attention scores aren't divided by the root of the head size; what can be trained "
            "is Megatron's T5, which is another function"
        )
    if config.positions.kind == "relative":
        raise NotExpressible("the model has relative positions, which can't be trained yet")
    if config.encoder.layers != config.layer_count:
        raise NotExpressible(
            f"the model has {config.encoder.layers} layers in its encoder and {config.layer_count} in its decoder; what can be trained has "
            "as many in both, as Megatron core's"
        )


def _check_experts(config: ModelConfig, layout: Layout, ranks: TensorGroup, options: ModelOptions) -> None:
    if layout.etp > 1 and config.mlp.bias:
        raise LayoutError(
            f"expert tensor parallel size (etp) is {layout.etp}, but experts with biases can't be sharded, as in Megatron core; "
            "take 1"
        )
    if layout.etp > 1 and options.lora is not None:
        raise LayoutError(
            f"expert tensor parallel size (etp) is {layout.etp}, but adapters are for whole experts; take 1"
        )
    if layout.tp > 1 and not ranks.sequence and options.trains:
        raise LayoutError(
            f"a mixture of experts at tp = {layout.tp} needs --sequence-parallel: else each tensor rank would route the same tokens"
        )
