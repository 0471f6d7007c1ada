"""The sizes that shapes are written in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megaconv.model.described import DescribedModel, value_of


class Size(NamedTuple):
    """A size that shapes are written in: the field that holds it, and its smallest valid value."""

    field: str
    least: int = 0

    def of(self, config: DescribedModel) -> Any:
        return value_of(config, self.field)


SIZES: Mapping[str, Size] = {
    "layers": Size("layers.count", 1),
    "hidden": Size("hidden", 1),
    "heads": Size("attention.heads", 1),
    "kv_heads": Size("attention.kv_heads", 1),
    "head_dim": Size("attention.head_dim", 1),
    "ffn": Size("mlp.ffn", 1),
    "vocab": Size("vocab", 1),
    "max_positions": Size("max_positions", 1),
    "experts": Size("experts.count", 0),
    "zero_experts": Size("experts.zero", 0),
    "moe_ffn": Size("experts.ffn", 0),
    "vision_ffn": Size("experts.vision_ffn", 0),
    "shared_ffn": Size("experts.shared_ffn", 0),
    "expert_latent": Size("experts.latent", 0),
    "encoder_layers": Size("encoder.layers"),
    "retriever_layers": Size("retrieval.layers"),
    "token_types": Size("token_types"),
    "classes": Size("head.classes"),
    "labels": Size("head.labels"),
    "unpredicted": Size("head.unpredicted"),
    "projection": Size("retriever.projection"),
    "relative_buckets": Size("positions.buckets"),
    "kv_rank": Size("latent.kv_rank"),
    "q_rank": Size("latent.q_rank"),
    "norm_gate": Size("norm.gate_rank"),
    "rope_dim": Size("latent.rope_dim"),
    "v_dim": Size("latent.v_dim"),
    "index_heads": Size("indexer.heads"),
    "index_dim": Size("indexer.head_dim"),
    "index_pool": Size("indexer.pool"),
    "channel_conv": Size("convolved.channels"),
    "head_conv": Size("convolved.heads"),
    "relative_width": Size("relative.width"),
    "relative_extent": Size("relative.extent"),
    "sublayer_conv": Size("sublayer_conv"),
    "scored_shared": Size("experts.scored_shared"),
    "router_width": Size("experts.router_width"),
    "linear_key_heads": Size("linear.key_heads"),
    "linear_value_heads": Size("linear.value_heads"),
    "linear_key_dim": Size("linear.key_dim"),
    "linear_value_dim": Size("linear.value_dim"),
    "linear_conv": Size("linear.conv"),
    "mamba_heads": Size("mamba.heads"),
    "mamba_head_dim": Size("mamba.head_dim"),
    "mamba_groups": Size("mamba.groups"),
    "mamba_state": Size("mamba.state"),
    "mamba1_width": Size("mamba1.width"),
    "mamba1_state": Size("mamba1.state"),
    "mamba1_conv": Size("mamba1.conv"),
    "mamba1_rank": Size("mamba1.rank"),
    "mamba1_heads": Size("mamba1.heads"),
    "recurrent_dim": Size("recurrent.head_dim"),
    "recurrent_conv": Size("recurrent.conv"),
    "adapter_rank": Size("blocks.adapter_rank"),
    "conv_width": Size("convolution.width"),
    "layer_input_width": Size("layer_inputs.width"),
    "layer_input_vocab": Size("layer_inputs.vocab"),
    "block_heads": Size("block_indexer.heads"),
    "block_dim": Size("block_indexer.head_dim"),
    "streams": Size("streams.count"),
    "laurel_rank": Size("streams.laurel_rank"),
    "hyper_streams": Size("hyper.streams"),
    "hyper_rank": Size("hyper.rank"),
    "ngram_size": Size("ngrams.size"),
    "ngram_width": Size("ngrams.width"),
    "ngram_conv": Size("ngrams.conv"),
    "compressed_q_rank": Size("compressed.q_rank"),
    "out_groups": Size("compressed.out_groups"),
    "out_rank": Size("compressed.out_rank"),
    "short_entry": Size("compressed.short"),
    "long_entry": Size("compressed.long"),
    "entry_heads": Size("compressed.index_heads"),
    "entry_dim": Size("compressed.index_dim"),
    "experts_per_token": Size("experts.per_token"),
}
"""Name of a size in shapes -> the size."""
