"""The models that can be trained, and the refusals of all others.

Refusals for a purpose, such as pairs or a teacher, are in purposes.py. planning/command.py refuses runs that
`plan` can't describe.
"""

from formats.wording import counted
from megaconv.errors import CorruptCheckpoint, LayoutError, NotExpressible
from megaconv.families import family
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.predicting import HYBRID_MTP
from megaconv.model.sharding import rank_sizes
from megaconv.model.subjects import RANKED_BY, Experts
from megaconv.planning.mixers import in_layer
from megatron_lite.models.layer_kinds import layer_shares
from megatron_lite.settings.architecture import OF_THEIR_OWN
from megatron_lite.settings.options import ModelOptions

TRAINED = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bailing_moe2", "bamba", "beam", "biogpt", "bitnet", "bloom", "codegen", "cohere",
    "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "diffllama", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "flint", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granite_moe", "granite_moe_hybrid", "granite_moe_shared", "granite_moe_swa", "granite_swa",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm2", "internlm3", "iquestcoder",
    "jais2", "kimi_linear", "kolibri1", "laguna",
    "lara_mini", "lfm2", "lfm2_moe", "lfm3",
    "llama", "llama4", "mamba2", "mellum", "mimo", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3",
    "mistral", "mistral4", "mixtral", "modernbert_decoder", "mpt",
    "nanochat", "nemotron", "nemotron_h", "nemotron_nas", "olmo", "olmo2", "olmo3", "olmoe",
    "olmo_hybrid", "openai_gpt", "opt",
    "persimmon", "phi", "phi3", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "step3p5",
    "vaultgemma", "xglm", "youtu",
)  # fmt: skip
"""Families that the decoder supports by configuration."""
CONVERTED_ONLY = {
    "roberta": "norms after the residual sums, as the original BERT, and positions that begin after the padding token's row",
    **dict.fromkeys(
        ("mt5", "umt5"), "attention scores that aren't divided by the root of the head size"
    ),
    **dict.fromkeys(
        ("bart", "m2m_100", "marian", "mbart", "pegasus"),
        "an encoder and a decoder whose layers are BART's",
    ),
    "apertus1p5_text": "a head without rows for the last tokens of the vocabulary",
    "axk2": "gates on norms, and latent attention with a gate of its output",
    "baichuan": "a head whose rows are divided by their lengths, and ALiBi beside gated MLPs",
    "bailing_hybrid": "Kimi delta attention, whose state forgets each channel by itself, and gates of whole heads",
    "doge": "a mask that depends on the values, and factors on residuals",
    "dory": "hidden states of length 1, and layers that run several times",
    "ernie4_5_vl_moe_text": "two mixtures of experts in a layer, one for text and one for images",
    "deepseek_v4": "attention to compressed tokens, several residual streams, and tables that choose experts",
    "glm5_next_text": "Kimi delta attention, several residual streams, and indexers that select groups of keys",
    "hy_v4": "several residual streams, layers that share an indexer's choice, and limits in experts alone",
    "hrm_text": "two stacks of layers that take turns",
    "minimax": "lightning attention",
    "jetmoe": "experts in attention",
    "longcat_flash": "experts whose sum joins after the next layer, and experts that return their input",
    "phimoe": "experts that sparsemixer chooses",
    "mamba": "Mamba 1",
    "falcon_mamba": "Mamba 1",
    "jamba": "Mamba 1",
    "recurrent_gemma": "gated linear recurrences",
    "inkling_text": "biases of scores that depend on the token, and convolutions of the outputs of sublayers",
    "zaya": "convolutions of queries and keys, and routers that are MLPs",
    "zamba": "Mamba 1, and a block of attention and an MLP that layers share",
    "zamba2": "blocks of attention and an MLP that layers share",
    "hy_v4_vl_text": "several residual streams, layers that share an indexer's choice, and limits in experts alone",
    "kimi_k3": "Kimi delta attention with a bounded decay, and attention to the outputs of earlier blocks of layers",
    "muse_glimmer_text": "norms of q, k and the embedding without weights, and factors on queries",
    "muse_spark_text": "gates of residuals, and experts with norms of another width",
    "gemma3n_text": "several residual streams, a second embedding, and layers that share keys and values",
    "minimax_m3_vl_text": "indexers that select blocks of keys",
    "qwen4_exp_text": "several residual streams, indexers that select blocks of keys, and embeddings of n-grams",
    "mistral_large4_text": "layers that share latent keys and values or an indexer's choice, and queries that grow by position",
    "molmo2_text": "a head without rows for the last tokens of the vocabulary",
}
"""Families that the decoder doesn't support -> the parts of their models that it lacks."""
RETRO = "retro"
"""The family whose layers attend to retrieved text: a decoder with a network of its own."""
NOT_COMPUTED = {
    "output_norm mla": "norms after its latent attention, not before it",
    "post_norm both_ways": "norms after the residual sums, as the original BERT",
    "capped_scores mla": "capped scores of latent attention",
    "capped_scores sinks": "capped scores beside attention sinks",
    "qk_l2_norm mla": "norms without weights in latent attention",
    "kept_keys": "a mask that depends on the values",
    "weighted_residuals": "factors on residuals",
    "relative_attention": "biases of scores that depend on the token",
    "sublayer_conv": "convolutions of the outputs of sublayers",
    "stored_scales": "stored numbers that scale MLPs and experts",
    "left_out_logits": "tokens whose logits are left out",
    "scored_shared": "shared experts that the router scores",
    "loops": "layers that run several times",
    "unit_states": "hidden states of length 1",
    "affine_residuals": "numbers that shift and scale residuals",
    "convolved_attention": "convolutions of queries and keys",
    "optional_experts": "routers that may select no expert",
    "router_mlp": "routers that are MLPs",
    "late_experts": "experts whose sum joins after the next layer",
    "attention_experts": "experts in attention",
    "expert_sum_bias": "a bias of the sum of experts",
    "final_epsilon": "another epsilon in the norm after the last layer",
    "zero_experts": "experts that return their input",
    "scaled_latents": "factors on the latent vectors of attention",
    "sparsemixer": "experts that sparsemixer chooses",
    "recurrence": "two stacks of layers that take turns",
    "lightning_layers": "lightning attention",
    "mamba1_layers": "Mamba 1",
    "recurrent_layers": "gated linear recurrences",
    "shared_blocks": "blocks of attention and an MLP that layers share",
    "compressed_layers": "attention to compressed tokens",
    "hyper_connections": "several residual streams, which each sublayer mixes",
    "ngram_layers": "embeddings of n-grams",
    "hash_layers": "tables that choose the experts of tokens",
    "clamped_experts": "limits of activations in routed experts alone",
    "index_pools": "indexers that select groups of keys",
    "kv_sources": "layers that share latent keys and values",
    "shared_index": "layers that share the positions that an indexer selected",
    "growing_queries": "queries that grow with the position by learned numbers",
    "scaled_frequencies": "learned factors on the frequencies of rope",
    "normalized_head": "a head whose rows are divided by their lengths",
    "block_indexer": "indexers that select blocks of keys",
    "head_gate qkv_bias": "gates of whole heads beside biases of q, k and v",
    "head_gate mla": "gates of whole heads in latent attention",
    "empty_layers": "layers with neither a mixer nor an MLP",
    "wide_values": "values that are wider than keys",
    "streams": "several residual streams",
    "sparse_mlp": "MLPs that set most of their elements to 0",
    "vision_experts": "experts for images beside those for text",
    "attention_residuals": "attention to the outputs of earlier blocks of layers",
    "situ": "an activation that a tanh limits",
    "shorter_head": "a head without rows for the last tokens of the vocabulary",
    "partly_scaled": "rope scaling in some of its layers",
}
"""Features that the decoder does not support, whatever the family."""
ROPE_SCALINGS = ("linear", "llama3", "yarn", "ntk_alpha", "proportional")
"""The kinds of rope scaling that the trainer computes."""
ROTATES_HEAD_DIM = ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu")
"""Families with latent attention whose transformers classes rotate head_dim elements if config.json contains head_dim."""


def check_trained(
    config: ModelConfig, layout: Layout, options: ModelOptions, *, sequence: bool
) -> None:
    """Raise NotExpressible if the model can't be trained, LayoutError if it can't be sharded.

    sequence: whether sequence parallelism is on.
    """
    _check_family(config.family)
    if config.retrieval.layers:
        _check_retrieval(config, layout, options, sequence=sequence)
    if options.fp8 is not None and config.family in OF_THEIR_OWN:
        raise NotExpressible(f"--fp8-format is for decoders; a {config.family} is computed in bf16")
    check_computed(config)
    if carries(config) and options.offloaded_layers:
        raise NotExpressible(
            "--cpu-offloading-num-layers can't be combined with layers that share keys and values, or that have inputs of their own"
        )
    _check_further_tokens(config)
    _check_latent_experts(config)
    _check_pairs(config, layout)
    if config.experts.count:
        _check_experts(config, layout, options, sequence=sequence)
    sizes = rank_sizes(config, layout)
    for layer in range(config.layer_count):
        layer_shares(config, layer, sizes, layout.tp)


def _check_family(family: str) -> None:
    """Raise NotExpressible for a family of another package, whose layers the decoder may not have."""
    if family in (*TRAINED, *OF_THEIR_OWN, RETRO):
        return
    if family in CONVERTED_ONLY:
        raise NotExpressible(
            f"a {family} is converted, but can't be trained yet: its models have {CONVERTED_ONLY[family]}"
        )
    raise NotExpressible(
        f"a {family} can't be trained; `megatron-lite models` lists the families that can"
    )


def _check_further_tokens(config: ModelConfig) -> None:
    if config.mtp_layers and not any(row.stage == "mtp" for row in family(config.family).rows):
        raise NotExpressible(
            f"the model would be a {config.family} that predicts further tokens, for whose layers no checkpoint has names; these are for "
            "mixtures of experts as DeepSeek-V3 and GLM-4.5 (--moe-router-score-function sigmoid, --moe-router-enable-expert-bias)"
        )
    if config.has("hybrid_stack") and (
        config.mtp_layers > 1 or (config.mtp_layers and not config.experts.count)
    ):
        raise NotExpressible(
            "a hybrid with Mamba layers has at most one layer that predicts further tokens, and that one has experts "
            f"({HYBRID_MTP}): set --mtp-num-layers 1 beside other layers with experts, or leave it out"
        )


def _check_pairs(config: ModelConfig, layout: Layout) -> None:
    """Raise LayoutError if tensor ranks would share a pair of heads."""
    pairs = config.attention.kv_heads // 2
    if config.has("differential") and pairs % layout.tp:
        raise LayoutError(
            f"the model has {pairs} pairs of key/value heads, which can't be divided over tensor parallel size (tp) = {layout.tp}; "
            f"choose a size that divides {pairs}"
        )


def _check_latent_experts(config: ModelConfig) -> None:
    with_names = (row for row in family(config.family).rows if "expert_latent" in (row.when or ""))
    if config.experts.latent and not any(with_names):
        raise NotExpressible(
            f"the model would be a {config.family} with experts of a latent width, which no checkpoint has names for; they are for hybrids "
            "with Mamba layers (--hybrid-override-pattern)"
        )


def carries(config: ModelConfig) -> bool:
    """Return whether layers hand on more than hidden states (carried.py)."""
    return config.has("shared_kv") or config.has("layer_inputs")


def check_computed(config: ModelConfig) -> None:
    """Raise NotExpressible for unsupported families and features."""
    _check_family(config.family)
    for feature, what in NOT_COMPUTED.items():
        if config.has(feature):
            raise NotExpressible(f"the model has {what}, which megatron_lite can't compute yet")
    if config.encoder.layers:
        _check_two_stacks(config)
    if config.experts.count:
        _check_groups(config.experts)
    if config.has("rope"):
        _check_rotated(config)
    inputs = config.layer_inputs
    if inputs.width and inputs.vocab < config.vocab:
        raise NotExpressible(
            f"the second embedding has rows for {inputs.vocab:,} tokens, and the vocabulary has {config.vocab:,}; it needs a row for each"
        )


def _check_rotated(config: ModelConfig) -> None:
    """Raise NotExpressible for heads that one rope can't rotate."""
    positions = config.positions
    kind_of_rope = (positions.scaling or {}).get("rope_type")
    if kind_of_rope == "proportional" and positions.rotary_percent != 1:
        raise NotExpressible(
            "rope scaling 'proportional' of a part of each head (partial_rotary_factor) can't be computed in this architecture yet"
        )
    widths: dict[bool, set[int]] = {}
    for kind in config.layers:
        is_local = config.has("two_ropes") and kind.window is not None
        width = rotated_width(in_layer(config, kind), local=is_local)
        widths.setdefault(is_local, set()).add(width)
        if width % 2:
            raise NotExpressible(
                f"the model rotates {width} elements of each head; elements rotate in pairs, so their number must be even"
            )
    for each in widths.values():
        if len(each) > 1:
            raise NotExpressible(
                f"layers with the same rope rotate heads of different widths ({sorted(each)}), which can't be trained yet"
            )


def check_rope_scaling(kind: str) -> None:
    """Raise NotExpressible for a kind of rope scaling that the trainer can't compute."""
    if kind not in ROPE_SCALINGS:
        raise NotExpressible(
            f"rope scaling {kind!r} can't be trained with; supported: {', '.join(ROPE_SCALINGS)}"
        )


def rotated_width(config: ModelConfig, *, local: bool = False) -> int:
    """Return the number of elements of each head that rotate.

    local: whether by the rope of layers with a window.
    """
    positions = config.positions
    own = positions.local_rotary_percent if local else None
    share = positions.rotary_percent if own is None else own
    return config.latent.rope_dim or int(config.attention.head_dim * share)


def _check_groups(experts: Experts) -> None:
    """Raise NotExpressible for groups of experts that no router can choose from; in transformers, torch raises an error."""
    groups = experts.groups
    if not groups or groups == 1:
        return
    chosen = experts.group_topk or groups
    each, rest = divmod(experts.count, groups)
    if rest or each < RANKED_BY or chosen > groups:
        raise NotExpressible(
            f"the model ranks {groups} groups of its {experts.count} experts by the best {RANKED_BY} of each, and takes {chosen}; "
            f"expected equal groups of {RANKED_BY} experts or more, and no more groups than there are (n_group, topk_group)"
        )
    available = chosen * each
    if experts.per_token > available:
        raise NotExpressible(
            f"the model gives each token {experts.per_token} experts (num_experts_per_tok) of its best {chosen} groups (topk_group), "
            f"which have {each} each, {available} in all"
        )


def _check_two_stacks(config: ModelConfig) -> None:
    if config.attention.scale is not None:
        raise NotExpressible(
            "the model is a T5 of transformers, whose attention scores aren't divided by the root of the head size; what can be trained "
            "is Megatron's T5, which is another function"
        )
    if config.positions.kind == "relative":
        raise NotExpressible("the model has relative positions, which can't be trained yet")
    if config.encoder.layers != config.layer_count:
        encoder = counted(config.encoder.layers, "layer")
        raise NotExpressible(
            f"the model has {encoder} in its encoder and {config.layer_count} in its decoder; what can be trained has as many in both, as "
            "Megatron core's"
        )


def _check_retrieval(
    config: ModelConfig, layout: Layout, options: ModelOptions, *, sequence: bool
) -> None:
    """Raise LayoutError or NotExpressible for a Retro that can't be computed."""
    if layout.pp > 1 or sequence:
        flag = "--sequence-parallel" if sequence else f"pp = {layout.pp}"
        raise LayoutError(
            f"{flag} is not supported with retrieval (Retro), as in Megatron core; take tensor and data parallelism"
        )
    unsupported = {
        "adapters (--lora-rank)": options.lora is not None,
        "--fp8-format": options.fp8 is not None,
        "--compile": options.compile,
        "--cpu-offloading-num-layers": options.offloaded_layers > 0,
        "experts": config.experts.count > 0,
        "latent attention": config.latent.kv_rank > 0,
        "key/value heads that heads share": config.attention.kv_heads != config.attention.heads,
        "layers without attention": any(kind.mixer != "attention" for kind in config.layers),
    }
    for what, is_asked in unsupported.items():
        if is_asked:
            raise NotExpressible(f"{what} can't be combined with retrieval (Retro)")


def _check_experts(
    config: ModelConfig, layout: Layout, options: ModelOptions, *, sequence: bool
) -> None:
    if layout.etp > 1 and config.mlp.bias:
        raise LayoutError(
            f"expert tensor parallel size (etp) is {layout.etp}, but experts with biases can't be sharded, as in Megatron core; "
            "take 1"
        )
    if layout.etp > 1 and options.lora is not None:
        raise LayoutError(
            f"expert tensor parallel size (etp) is {layout.etp}, but adapters are for whole experts; take 1"
        )
    if layout.tp > 1 and not sequence and options.trains:
        raise LayoutError(
            f"a mixture of experts at tp = {layout.tp} needs --sequence-parallel: else each tensor rank would route the same tokens"
        )


def refuse_two_widths(config: ModelConfig, place: str) -> None:
    """Raise CorruptCheckpoint if transformers would rotate a width (head_dim) that differs from qk_rope_head_dim."""
    given, rope_dim = (config.hf or {}).get("head_dim"), config.latent.rope_dim
    if config.family in ROTATES_HEAD_DIM and given not in (None, rope_dim):
        raise CorruptCheckpoint(
            f"{place}: {CONFIG_NAME} has head_dim {given!r} and qk_rope_head_dim {rope_dim}, two words for the width that rotates; "
            "leave head_dim out"
        )
