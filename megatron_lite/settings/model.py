"""Settings of the model: layers, sizes, attention, experts. They have the form of the settings in config.py."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Model:
    """Model (with --load: the checkpoint's; contradicting flags are errors)"""

    model_type: str | None = flag(
        None,
        "type of the model: gpt is a decoder, bert an encoder, t5 both, biencoder a retriever (default: the checkpoint's, or gpt)",
        choices=("gpt", "bert", "t5", "biencoder"),
    )
    num_layers: int | None = flag(
        None, "transformer layers; for a T5, layers of the encoder and of the decoder"
    )
    encoder_num_layers: int | None = flag(None, "T5: another name for --num-layers")
    decoder_num_layers: int | None = flag(
        None, "T5: must equal the encoder's layers, as in Megatron core"
    )
    hidden_size: int | None = flag(None, "width of the model")
    ffn_hidden_size: int | None = flag(
        None, "width of the MLP (default: 4 x hidden; 8/3 x hidden with --swiglu, rounded to 64)"
    )
    num_attention_heads: int | None = flag(None, "attention heads")
    group_query_attention: bool = flag(False, "share keys and values among groups of heads")
    num_query_groups: int = flag(1, "groups of --group-query-attention")
    kv_channels: int | None = flag(None, "size of one head (default: hidden / heads)")
    max_position_embeddings: int | None = flag(
        None, "longest sequence of the model (default: --seq-length)"
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "kind of position embedding",
        choices=("learned_absolute", "rope", "none"),
    )
    rotary_base: float = flag(10000.0, "theta of the rotary embedding")
    rotary_percent: float = flag(1.0, "rotary part of a head")
    use_rope_scaling: bool = flag(False, "scale the rotary embedding as Llama 3.1 does")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling")
    normalization: str = flag("LayerNorm", "kind of norms", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon of the norms")
    apply_layernorm_1p: bool = flag(
        False, "norms multiply by their weight + 1; the weight starts at 0"
    )
    swiglu: bool = flag(False, "gated MLP with SiLU instead of GELU")
    squared_relu: bool = flag(False, "MLP with squared ReLU instead of GELU")
    no_bias_gelu_fusion: bool = flag(False, "use the exact GELU instead of the tanh approximation")
    disable_bias_linear: bool = flag(False, "no biases in linear layers")
    add_qkv_bias: bool = flag(False, "biases on q, k and v, also with --disable-bias-linear")
    qk_layernorm: bool = flag(False, "norms on q and k")
    untie_embeddings_and_output_weights: bool = flag(
        False, "use separate matrices for embedding and head"
    )
    attention_dropout: float = flag(0.1, "dropout of attention weights")
    hidden_dropout: float = flag(0.1, "dropout of each block's output, before the residual sum")
    init_method_std: float = flag(0.02, "standard deviation of initial weights")
    num_experts: int | None = flag(None, "experts of each layer, instead of one MLP")
    moe_router_topk: int = flag(2, "experts for each token")
    moe_ffn_hidden_size: int | None = flag(None, "width of an expert (default: --ffn-hidden-size)")
    moe_router_pre_softmax: bool = flag(
        False, "compute the softmax over all experts, not over the chosen ones"
    )
    moe_layer_freq: str | None = flag(
        None, "layers with experts: every N-th, or a pattern such as [0]*1+[1]*3 (default: all)"
    )
    moe_router_score_function: str = flag(
        "softmax", "function from the router's logits to scores", choices=("softmax", "sigmoid")
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "add a bias for each expert to the choice, which balances without a loss"
    )
    moe_router_num_groups: int | None = flag(
        None, "groups of experts; each token uses only the best groups"
    )
    moe_router_group_topk: int | None = flag(None, "groups that each token uses")
    moe_router_topk_scaling_factor: float | None = flag(None, "factor on the weights of experts")
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of the shared expert, which processes every token"
    )
    moe_shared_expert_gate: bool = flag(False, "gate on the shared expert")
    moe_latent_size: int | None = flag(
        None, "width of the routed experts' input and output in a hybrid (default: the hidden size)"
    )
    multi_latent_attention: bool = flag(
        False, "compute keys and values from one latent vector for each token, as DeepSeek does"
    )
    q_lora_rank: int | None = flag(
        None, "width of the latent vector for queries (default: no latent vector)"
    )
    kv_lora_rank: int = flag(32, "width of the latent vector for keys and values")
    qk_head_dim: int = flag(128, "elements of a q or k head without rotary embedding")
    qk_pos_emb_head_dim: int = flag(64, "elements of a q or k head with rotary embedding")
    v_head_dim: int = flag(128, "elements of a head of v")
    rope_type: str | None = flag(
        None,
        "rotary embedding of latent attention; yarn equals rope while --rotary-scaling-factor is 1 (default: yarn)",
        choices=("rope", "yarn"),
    )
    rotary_scaling_factor: float = flag(
        1.0, "yarn in latent attention: context length as a multiple of 4096 tokens"
    )
    mscale: float = flag(
        1.0,
        "yarn in latent attention: scale of the rotary embedding, multiplied by the factor's logarithm",
    )
    mscale_all_dim: float = flag(
        0.0, "yarn in latent attention: the same for attention scores; 0: no scaling of either"
    )
    mtp_num_layers: int | None = flag(
        None, "multi-token prediction layers; each predicts one token further"
    )
    hybrid_override_pattern: str | None = flag(
        None,
        "layers of a hybrid, a symbol each: M Mamba 2, * attention, - MLP, E experts (also --hybrid-layer-pattern)",
    )
    hybrid_attention_ratio: float = flag(
        0.0, "share of attention layers in a hybrid without a pattern"
    )
    hybrid_mlp_ratio: float = flag(0.0, "share of MLP layers in a hybrid without a pattern")
    spec: tuple[str, ...] = flag(
        (),
        "layers of the model: megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec for a hybrid",
    )
    is_hybrid_model: bool = flag(False, "the model is a hybrid of Mamba 2 and other layers")
    mamba_num_heads: int | None = flag(
        None, "Mamba 2: heads (default: 2 x hidden / --mamba-head-dim)"
    )
    mamba_head_dim: int = flag(64, "Mamba 2: elements of a head")
    mamba_num_groups: int = flag(8, "Mamba 2: groups of heads, each with one B and one C")
    mamba_state_dim: int = flag(128, "Mamba 2: elements of the state of each element of a head")
    experimental_attention_variant: str | None = flag(
        None, "layers without plain attention", choices=("gated_delta_net",)
    )
    linear_attention_freq: str | None = flag(
        None,
        "layers with delta nets: all except every N-th, or a pattern such as [1]*3+[0]*1",
    )
    linear_conv_kernel_dim: int = flag(4, "delta nets: tokens of the convolution")
    linear_key_head_dim: int = flag(128, "delta nets: elements of a key head")
    linear_value_head_dim: int = flag(128, "delta nets: elements of a value head")
    linear_num_key_heads: int = flag(16, "delta nets: key heads")
    linear_num_value_heads: int = flag(32, "delta nets: value heads")
    attention_output_gate: bool = flag(
        False, "scale the output of attention by the sigmoid of a further projection"
    )
    bert_no_binary_head: bool = flag(
        False, "BERT: no token types and no head for the order of two parts"
    )
    biencoder_projection_dim: int = flag(
        0, "biencoder: width of an embedding (default: the first token, as wide as the model)"
    )
    ict_head_size: int | None = flag(
        None, "biencoder: width of an embedding behind a pooler, as in Megatron-LM 2.0"
    )
    biencoder_shared_query_context_model: bool = flag(
        False, "biencoder: one tower for queries and contexts"
    )
    vocab_size: int | None = flag(
        None,
        "tokens of the vocabulary; NullTokenizer adds an end of document (default: the tokenizer's)",
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this number times tp"
    )
