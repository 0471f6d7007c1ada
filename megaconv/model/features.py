"""The features of a model and of its layers. A table's rows and families depend on them by name."""

from collections.abc import Callable, Mapping
from functools import cache

from megaconv.model.described import DescribedModel
from megaconv.model.subjects import LayerKind


def _without_words(config: DescribedModel) -> bool:
    """True if the model has a head for a task (classification, multiple choice, retrieval) instead of a language-model
    head."""
    of_task = config.head.classes or config.head.choices or config.retriever.towers
    return bool(of_task) and not config.head.activation


OF_MODEL: Mapping[str, Callable[[DescribedModel], bool]] = {
    "untied": lambda config: (
        not config.tie_embeddings and not _without_words(config) and not config.head.labels
    ),
    "scores": lambda config: config.head.labels > 0,
    "score_bias": lambda config: config.head.labels > 0 and config.head.labels_bias,
    "rope": lambda config: config.positions.kind == "rope",
    "interleaved": lambda config: config.positions.interleaved,
    "skips_rope": lambda config: not all(each.rotates for each in config.layers),
    "learned": lambda config: config.positions.kind == "learned",
    "stored_positions": lambda config: (
        config.positions.kind == "sinusoidal" and config.positions.stored
    ),
    "relative": lambda config: config.positions.kind == "relative",
    "relative_by_layer": lambda config: (
        config.positions.kind == "relative" and config.positions.by_layer
    ),
    "norm_bias": lambda config: (
        config.norm.kind == "LayerNorm" and config.norm.bias and config.norm.weight
    ),
    "norm_weight": lambda config: config.norm.weight,
    "shared_norm": lambda config: config.norm.shared and config.parallel_residual,
    "inner_norm": lambda config: config.norm.inner,
    "expert_output_norm": lambda config: config.norm.after_experts,
    "embedding_norm": lambda config: config.norm.embedding,
    "skipped_norm": lambda config: config.norm.skips_first,
    "parallel": lambda config: config.parallel_residual,
    "zero_centered": lambda config: config.norm.zero_centered,
    "pre_norm": lambda config: config.norm.place == "before",
    "post_norm": lambda config: config.norm.place == "after_sum",
    "output_norm": lambda config: config.norm.place == "after",
    "sandwich_norm": lambda config: config.norm.place == "both",
    "norm_by_mixer": lambda config: config.norm.place == "by_mixer",
    "final_norm": lambda config: config.norm.final,
    "qkv_bias": lambda config: config.attention.qkv_bias,
    "o_bias": lambda config: config.attention.o_bias,
    "qk_norm": lambda config: config.attention.qk_norm,
    "wide_qk_norm": lambda config: (
        config.attention.qk_norm and config.attention.qk_norm_width == "all"
    ),
    "qk_norm_bias": lambda config: config.attention.qk_norm and config.attention.qk_norm_bias,
    "own_qk_norm": lambda config: (
        config.attention.qk_norm and config.attention.qk_norm_width == "own"
    ),
    "qk_l2_norm": lambda config: config.attention.qk_l2_norm,
    "qkv_alone": lambda config: config.attention.qkv_bias and not config.attention.o_bias,
    "scaled_scores": lambda config: config.attention.scale is not None,
    "capped_scores": lambda config: config.attention.score_cap is not None,
    "block_indexer": lambda config: any(each.indexed for each in config.layers),
    "head_gate": lambda config: config.attention.head_gate,
    "gate_bias": lambda config: config.attention.output_gate and config.attention.gate_bias,
    "differential": lambda config: config.attention.differential,
    "kept_keys": lambda config: config.attention.kept_keys > 0,
    "weighted_residuals": lambda config: config.weighted_residuals,
    "relative_attention": lambda config: config.relative.width > 0,
    "sublayer_conv": lambda config: config.sublayer_conv > 0,
    "stored_scales": lambda config: config.stored_scales,
    "left_out_logits": lambda config: config.head.left_out > 0 and not config.head.labels,
    "affine_residuals": lambda config: config.affine_residuals,
    "convolved_attention": lambda config: config.convolved.channels > 0,
    "depth_residuals": lambda config: config.residual_by_depth,
    "softplus_gate": lambda config: (
        (config.attention.output_gate or config.attention.head_gate)
        and config.attention.gate_activation == "softplus"
    ),
    "limits": lambda config: any(
        each.limit is not None or each.shared_limit is not None for each in config.layers
    ),
    "two_rotations": lambda config: config.positions.local_rotary_percent is not None,
    "normalized_head": lambda config: config.head.normalized and not config.head.labels,
    "shorter_head": lambda config: config.head.unpredicted > 0,
    "partly_scaled": lambda config: (
        config.positions.scaling is not None
        and not all(each.scales_positions for each in config.layers)
    ),
    "capped_logits": lambda config: config.head.logit_cap is not None and not config.head.labels,
    "scaled_embedding": lambda config: config.embedding_scale is not None,
    "tempered": lambda config: config.temperature.scale != 0,
    "chunks": lambda config: any(each.chunk is not None for each in config.layers),
    "two_ropes": lambda config: config.positions.local_theta is not None,
    "sinks": lambda config: config.attention.sinks,
    "window_sinks": lambda config: config.attention.sinks and config.attention.sinks_in_windows,
    "value_width": lambda config: config.attention.v_dim is not None,
    "wide_values": lambda config: any(
        config.attention.value_dim > (each.head_dim or config.attention.head_dim)
        for each in config.layers
        if config.attention.v_dim is not None
    ),
    "value_scale": lambda config: config.attention.value_scale is not None,
    "output_gate": lambda config: config.attention.output_gate,
    "linear_layers": lambda config: any(each.mixer == "linear" for each in config.layers),
    "kda_layers": lambda config: any(each.mixer == "kda" for each in config.layers),
    "full_rank_out_gate": lambda config: config.linear.full_rank_out_gate,
    "compressed_layers": lambda config: any(each.mixer == "compressed" for each in config.layers),
    "hyper_connections": lambda config: config.hyper.streams > 0,
    "ngram_layers": lambda config: any(each.ngram_rows for each in config.layers),
    "ngram_hashes": lambda config: config.ngrams.stored_hashes,
    "hash_layers": lambda config: any(each.hashed for each in config.layers),
    "mamba_layers": lambda config: any(
        each.mixer in ("mamba", "side_by_side") for each in config.layers
    ),
    "side_by_side": lambda config: any(each.mixer == "side_by_side" for each in config.layers),
    "mamba_norm": lambda config: config.mamba.norm != "none",
    "loops": lambda config: config.loops.runs > 0,
    "unit_states": lambda config: config.unit_states.unit > 0,
    "recurrence": lambda config: config.recurrence.high > 0,
    "lightning_layers": lambda config: any(each.mixer == "lightning" for each in config.layers),
    "mamba1_layers": lambda config: any(each.mixer == "mamba1" for each in config.layers),
    "mamba1_bias": lambda config: config.mamba1.bias,
    "mamba1_conv_bias": lambda config: config.mamba1.conv_bias,
    "recurrent_layers": lambda config: any(each.mixer == "recurrent" for each in config.layers),
    "shared_blocks": lambda config: any(each.block for each in config.layers),
    "block_adapters": lambda config: config.blocks.attention_adapters,
    "convolution_layers": lambda config: any(each.mixer == "convolution" for each in config.layers),
    "hybrid_stack": lambda config: any(
        each.mixer in ("mamba", "none") or each.mlp == "none" for each in config.layers
    ),
    "empty_layers": lambda config: any(each.mixer == each.mlp == "none" for each in config.layers),
    "parts_left_out": lambda config: (
        config.positions.kind == "rope"
        and any("none" in (each.mixer, each.mlp) for each in config.layers)
        and all(each.mixer in ("attention", "none") for each in config.layers)
    ),
    "only_mamba": lambda config: all(
        each.mixer == "mamba" and each.mlp == "none" and not each.block for each in config.layers
    ),
    "mlp_bias": lambda config: config.mlp.bias,
    "gated": lambda config: config.mlp.gated,
    "plain": lambda config: not config.mlp.gated,
    "silu": lambda config: config.mlp.activation == "silu",
    "gelu_tanh": lambda config: config.mlp.activation == "gelu_tanh",
    "quick_gelu": lambda config: config.mlp.activation == "quick_gelu",
    "relu2": lambda config: config.mlp.activation == "relu2",
    "clamped": lambda config: config.mlp.clamp is not None or bool(config.mlp.offset),
    "mla": lambda config: config.latent.kv_rank > 0,
    "q_latent": lambda config: config.latent.q_rank > 0,
    "q_direct": lambda config: config.latent.q_rank == 0,
    "indexer": lambda config: config.indexer.heads > 0,
    "index_pools": lambda config: config.indexer.pool > 0,
    "interleaved_indexer": lambda config: config.indexer.interleaved,
    "mixture": lambda config: config.experts.count > 0,
    "attention_experts": lambda config: config.attention.of_experts,
    "expert_sum_bias": lambda config: config.experts.count > 0 and config.experts.output_bias,
    "final_epsilon": lambda config: config.norm.final_epsilon not in (None, config.norm.epsilon),
    "zero_experts": lambda config: config.experts.zero > 0,
    "optional_experts": lambda config: config.experts.count > 0 and config.experts.optional,
    "scored_shared": lambda config: config.experts.count > 0 and config.experts.scored_shared > 0,
    "router_mlp": lambda config: config.experts.router_width > 0,
    "stored_idle": lambda config: config.experts.zero > 0 and config.experts.stores_idle,
    "late_experts": lambda config: config.experts.count > 0 and config.experts.joins_late,
    "scaled_latents": lambda config: config.latent.kv_rank > 0 and config.latent.scaled,
    "sparsemixer": lambda config: config.experts.score == "sparsemixer",
    "sigmoid_router": lambda config: config.experts.score == "sigmoid",
    "shared_ffn": lambda config: config.experts.shared_ffn > 0,
    "vision_experts": lambda config: config.experts.vision_ffn > 0,
    "shared_gate": lambda config: config.experts.shared_gate,
    "router_bias": lambda config: config.experts.router_bias,
    "expert_norms": lambda config: config.experts.own_norms,
    "layer_inputs": lambda config: config.layer_inputs.width > 0,
    "streams": lambda config: config.streams.count > 0,
    "sparse_mlp": lambda config: any(each.sparsity for each in config.layers),
    "layer_scale": lambda config: config.layer_scale,
    "attention_residuals": lambda config: config.residual_block > 0,
    "xielu": lambda config: config.mlp.activation == "xielu",
    "situ": lambda config: config.mlp.activation == "situ",
    "layers_differ": lambda config: any(
        config.own_sizes(each) for each in range(config.layer_count)
    ),
    "shared_kv": lambda config: any(each.shares_kv for each in config.layers),
    "keys_as_values": lambda config: any(each.keys_as_values for each in config.layers),
    "clamped_experts": lambda config: config.experts.clamp is not None,
    "kv_sources": lambda config: any(each.kv_source is not None for each in config.layers),
    "shared_index": lambda config: any(each.shares_index for each in config.layers),
    "growing_queries": lambda config: config.attention.growing,
    "scaled_frequencies": lambda config: config.positions.scaled_frequencies,
    "v_norm": lambda config: config.attention.v_norm,
    "probs_on_input": lambda config: config.experts.probs_on_input,
    "expert_latent": lambda config: config.experts.latent > 0,
    "expert_latent_norm": lambda config: config.experts.latent_norm,
    "encoder": lambda config: config.encoder.layers > 0,
    "retrieval": lambda config: config.retrieval.layers > 0,
    "retrieval_from_6": lambda config: config.retrieving[:1] == range(5, 6),
    "retrieval_from_9": lambda config: config.retrieving[:1] == range(8, 9),
    "token_types": lambda config: config.token_types > 0,
    "binary_head": lambda config: config.head.binary,
    "classification_head": lambda config: config.head.classes > 0,
    "multichoice_head": lambda config: config.head.choices,
    "pooler": lambda config: config.head.binary or bool(config.head.classes or config.head.choices),
    "stored_pooler": lambda config: config.head.pooler,
    "both_ways": lambda config: bool(
        config.head.activation
        or config.head.classes
        or config.head.choices
        or config.retriever.towers
    ),
    "retriever": lambda config: bool(config.retriever.towers),
    "separate_towers": lambda config: config.retriever.towers == "separate",
    "shared_tower": lambda config: config.retriever.towers == "shared",
    "projection": lambda config: config.retriever.projection > 0,
    "tower_pooler": lambda config: config.retriever.pooler,
    "head_bias": lambda config: config.head.bias and not config.head.labels,
    "transform": lambda config: bool(config.head.activation),
    "head_projection": lambda config: bool(config.head.projection),
    "windows": lambda config: config.window is not None,
    "tower": lambda config: config.whole is not None and bool(config.whole.tower),
    "only_windows": lambda config: all(each.window is not None for each in config.layers),
}
"""Features that all layers of a model have, or none. A table's row or a family may depend on them."""
OF_LAYER: Mapping[str, Callable[[DescribedModel, LayerKind, int], bool]] = {
    "attention": lambda config, kind, layer: kind.mixer in ("attention", "side_by_side"),
    "linear": lambda config, kind, layer: kind.mixer == "linear",
    "kda": lambda config, kind, layer: kind.mixer == "kda",
    "compressed": lambda config, kind, layer: kind.mixer == "compressed",
    "selected_entries": lambda config, kind, layer: (
        kind.mixer == "compressed" and kind.entries == "selected"
    ),
    "all_entries": lambda config, kind, layer: kind.mixer == "compressed" and kind.entries == "all",
    "hashed": lambda config, kind, layer: kind.hashed,
    "ngrams": lambda config, kind, layer: kind.ngram_rows > 0,
    "mamba": lambda config, kind, layer: kind.mixer in ("mamba", "side_by_side"),
    "mamba1": lambda config, kind, layer: kind.mixer == "mamba1",
    "lightning": lambda config, kind, layer: kind.mixer == "lightning",
    "recurrent": lambda config, kind, layer: kind.mixer == "recurrent",
    "convolution": lambda config, kind, layer: kind.mixer == "convolution",
    "block": lambda config, kind, layer: kind.block,
    "holds_block": lambda config, kind, layer: kind.block and config.holds_block(layer),
    "moe": lambda config, kind, layer: config.experts.count > 0 and kind.mlp == "experts",
    "dense": lambda config, kind, layer: (
        kind.mlp != "none" and not (config.experts.count and kind.mlp == "experts")
    ),
    "indexed": lambda config, kind, layer: kind.indexed,
    "rotating": lambda config, kind, layer: kind.rotates,
    "own_latent": lambda config, kind, layer: kind.kv_source is None,
    "own_index": lambda config, kind, layer: not kind.shares_index,
    "own_kv": lambda config, kind, layer: not kind.shares_kv,
    "own_values": lambda config, kind, layer: not kind.shares_kv and not kind.keys_as_values,
    "retrieves": lambda config, kind, layer: layer in config.retrieving,
    "window": lambda config, kind, layer: kind.window is not None,
    "sinks_here": lambda config, kind, layer: (
        config.attention.sinks
        and (kind.window is not None or not config.attention.sinks_in_windows)
    ),
    "o_bias_here": lambda config, kind, layer: (
        config.attention.o_bias
        and (not config.attention.o_bias_last or layer == config.layer_count - 1)
    ),
    "first_layer": lambda config, kind, layer: layer == 0,
    "later_layer": lambda config, kind, layer: layer > 0,
}
"""Features of one layer. Each function takes (config, kind, layer)."""


@cache
def parsed(features: str) -> tuple[frozenset[str], frozenset[str]]:
    """(wanted, unwanted) features of a text such as `moe !shared_ffn`. Raises KeyError for an unknown feature."""
    names = features.split()
    for name in (name.removeprefix("!") for name in names):
        if name not in OF_MODEL and name not in OF_LAYER:
            raise KeyError(name)
    unwanted = frozenset(name[1:] for name in names if name.startswith("!"))
    return frozenset(name for name in names if not name.startswith("!")), unwanted
