"""Settings of what a model is: layers, sizes, attention, experts. As config.py has all others."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Model:
    """Model; with --load all of this comes from the checkpoint, and a flag that contradicts it is an error"""

    model_type: str | None = flag(
        None,
        "a decoder; or an encoder, or one with a decoder, that learns from hidden words (gpt, or the checkpoint's)",
        choices=("gpt", "bert", "t5"),
    )
    num_layers: int | None = flag(None, "transformer layers; of a T5 those of each stack")
    encoder_num_layers: int | None = flag(None, "of a T5: another name for --num-layers")
    decoder_num_layers: int | None = flag(
        None, "of a T5: as many as its encoder has, which Megatron core gives it anyway"
    )
    hidden_size: int | None = flag(None, "width of the model")
    ffn_hidden_size: int | None = flag(None, "width of the MLP (4 x hidden; 8/3 x hidden with --swiglu, rounded to 64)")
    num_attention_heads: int | None = flag(None, "attention heads")
    group_query_attention: bool = flag(False, "heads share keys and values in groups")
    num_query_groups: int = flag(1, "groups of --group-query-attention")
    kv_channels: int | None = flag(None, "size of one head (hidden / heads)")
    max_position_embeddings: int | None = flag(None, "longest sequence that the model is for (--seq-length)")
    position_embedding_type: str = flag(
        "learned_absolute", "kind of position embedding", choices=("learned_absolute", "rope")
    )
    rotary_base: float = flag(10000.0, "theta of the rotary embedding")
    rotary_percent: float = flag(1.0, "part of a head that rotates")
    use_rope_scaling: bool = flag(False, "scale the rotary embedding as Llama 3.1 does")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling")
    normalization: str = flag("LayerNorm", "kind of norms", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon of the norms")
    apply_layernorm_1p: bool = flag(False, "norms multiply with their weight + 1, which starts at 0")
    swiglu: bool = flag(False, "gated MLP with SiLU instead of GELU")
    no_bias_gelu_fusion: bool = flag(False, "exact GELU, not its approximation by tanh")
    disable_bias_linear: bool = flag(False, "no biases in linear layers")
    add_qkv_bias: bool = flag(False, "biases on q, k and v even so")
    qk_layernorm: bool = flag(False, "norms on q and k")
    untie_embeddings_and_output_weights: bool = flag(False, "a head of its own")
    attention_dropout: float = flag(0.1, "dropout of attention weights")
    hidden_dropout: float = flag(0.1, "dropout of what each block adds")
    init_method_std: float = flag(0.02, "standard deviation of initial weights")
    num_experts: int | None = flag(None, "experts of each layer, in place of one MLP")
    moe_router_topk: int = flag(2, "experts that a token goes to")
    moe_ffn_hidden_size: int | None = flag(None, "width of an expert (--ffn-hidden-size)")
    moe_router_pre_softmax: bool = flag(
        False, "weights of experts are a softmax over all of them, not over those chosen"
    )
    moe_layer_freq: str | None = flag(None, "which layers have experts: every N-th, or [0]*1+[1]*3 (all)")
    moe_router_score_function: str = flag(
        "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "a bias for each expert in the choice, which balances without a loss"
    )
    moe_router_num_groups: int | None = flag(None, "groups of experts, the best of which a token chooses from")
    moe_router_group_topk: int | None = flag(None, "how many of them")
    moe_router_topk_scaling_factor: float | None = flag(None, "a factor on the weights of experts")
    moe_shared_expert_intermediate_size: int | None = flag(None, "width of an expert that every token passes")
    moe_shared_expert_gate: bool = flag(False, "a gate on that one")
    multi_latent_attention: bool = flag(
        False, "keys and values made of one latent vector for each token, as DeepSeek's"
    )
    q_lora_rank: int | None = flag(None, "width of the latent vector that queries are made of (made directly)")
    kv_lora_rank: int = flag(32, "width of the one of keys and values")
    qk_head_dim: int = flag(128, "elements of a head of q and k that don't rotate")
    qk_pos_emb_head_dim: int = flag(64, "those that do")
    v_head_dim: int = flag(128, "elements of a head of v")
    rope_type: str | None = flag(
        None, "of latent attention (yarn, which is rope as long as its factor is 1)", choices=("rope", "yarn")
    )
    rotary_scaling_factor: float = flag(1.0, "of its yarn: how many times as long as 4096 tokens texts become")
    mscale: float = flag(1.0, "the same: what rotations are scaled with, by the logarithm of that")
    mscale_all_dim: float = flag(0.0, "the same of attention's scores; 0: neither is scaled")
    mtp_num_layers: int | None = flag(None, "layers that predict further tokens, one each")
    bert_no_binary_head: bool = flag(
        False, "of a BERT: neither types of tokens nor a head that tells whether two parts have changed places"
    )
    vocab_size: int | None = flag(None, "tokens (the tokenizer's); NullTokenizer adds one more, the end of a document")
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this times tp")
