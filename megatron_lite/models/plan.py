"""What all parts of a model are built from, and which models there is code for."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from megaconv.errors import LayoutError, NotExpressible
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, padded_vocab
from megaconv.model.sharding import rank_sizes
from megaconv.model.subjects import LayerKind
from megatron_lite.models import recompute
from megatron_lite.models.preference import FIGURES
from megatron_lite.parallel.tensor import Keep, TensorGroup
from megatron_lite.settings.options import ModelOptions


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
    expert_group: ProcessGroup | None = None
    """The ranks that share the experts of each layer."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of all losses that the last stage computes, and of what it reports beside; the first is what the word alone means."""
        if self.options.preference is not None:
            return ("loss", *FIGURES)
        return ("loss", *(f"mtp_{depth + 1}_loss" for depth in range(self.config.mtp_layers)))

    def kind(self, layer: int) -> LayerKind:
        """Of a layer; those that predict further tokens are counted behind all others, and are like the last of these."""
        return self.config.layers[min(layer, self.config.layer_count - 1)]

    @property
    def norm_bias(self) -> bool:
        return self.config.norm.kind == "LayerNorm"

    @property
    def keep(self) -> Keep:
        return recompute.make_again if self.options.recompute.granularity == "selective" else recompute.keep


TRAINED = (
    "arcee", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "glm", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_oss", "hy_v3",
    "jais2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2",
)  # fmt: skip
"""Families that this decoder is, by configuration."""
NOT_COMPUTED = {
    "indexer": "an indexer that chooses positions",
    "zero_centered": "norms that multiply with their weight + 1",
    "output_norm": "norms after its sublayers, not before them",
    "sandwich_norm": "norms after its sublayers, too",
    "wide_qk_norm": "norms of q and k over all heads",
    "qk_l2_norm": "q and k divided by their L2 norm",
    "scaled_scores": "attention scores with a scale of their own",
    "capped_scores": "capped attention scores",
    "capped_logits": "capped logits",
    "scaled_embedding": "a scaled embedding",
    "two_ropes": "another base of rope in layers with a window",
}
"""Features of a model that this decoder has no code for, whatever its family."""


def make_plan(
    config: ModelConfig,
    layout: Layout,
    options: ModelOptions,
    ranks: TensorGroup,
    expert_group: ProcessGroup | None = None,
) -> Plan:
    """Raises NotExpressible for a model that can't be trained, LayoutError for one that can't be sharded."""
    if config.family not in TRAINED:
        raise NotExpressible(f"a {config.family} can't be trained yet; models that can are {', '.join(TRAINED)}")
    for feature, what in NOT_COMPUTED.items():
        if config.has(feature):
            raise NotExpressible(f"the model has {what}, which can't be trained yet")
    if config.mtp_layers and config.tie_embeddings:
        raise NotExpressible("the model predicts further tokens with tied embeddings, which can't be trained yet")
    if config.mtp_layers and options.preference is not None:
        raise NotExpressible("the model predicts further tokens, which can't be trained on pairs of answers yet")
    rows = padded_vocab(config.vocab, options.vocab_divisor, layout.tp)
    if config.experts.count:
        _check_experts(layout, ranks, options)
        if options.compile:
            raise NotExpressible(
                "a mixture of experts can't be compiled yet: how many rows an expert gets changes all the time"
            )
    return Plan(config, options, ranks, rank_sizes(config, layout), rows, expert_group)


def _check_experts(layout: Layout, ranks: TensorGroup, options: ModelOptions) -> None:
    if layout.etp > 1:
        raise LayoutError(f"expert tensor parallel size is {layout.etp}, but experts can't be sharded yet; take 1")
    if layout.tp > 1 and not ranks.sequence and options.trains:
        raise LayoutError(
            f"a mixture of experts at tp = {layout.tp} needs --sequence-parallel: else each tensor rank would route the same tokens"
        )
