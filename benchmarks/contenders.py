"""The contenders of the trainer's benchmarks: one training step of the trainer, of transformers and of Megatron core."""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from megaconv.model.config import ModelConfig
from megaconv.model.fields import fields_of, from_fields
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.checkpoint.weights import init_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.parallel.grid import make_grid
from megatron_lite.products.transformer_engine import has_transformer_engine
from megatron_lite.settings.options import LoRA, ModelOptions, OptimizerOptions


def model(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    positions: int,
    *,
    tied: bool = False,
) -> ModelConfig:
    return from_fields(
        "llama",
        {
            "layers.count": layers,
            "hidden": hidden,
            "attention.heads": heads,
            "attention.kv_heads": kv_heads,
            "attention.head_dim": hidden // heads,
            "mlp.ffn": ffn,
            "vocab": vocab,
            "max_positions": positions,
            "norm.epsilon": 1e-5,
            "positions.theta": 1e4,
            "tie_embeddings": tied,
        },
    )


SMALL = model(8, 384, 6, 6, 1024, 16384, 512)
TINY = model(4, 64, 4, 4, 128, 256, 64)
CPU = torch.device("cpu")
EXPERTS = {
    "coarse": {"layers.mlp": "experts", "experts.count": 8, "experts.per_token": 2},
    "fine-grained": {"layers.mlp": "experts", "experts.count": 64, "experts.per_token": 8},
}


def chosen(mixture: str | None, tiny: bool) -> ModelConfig:
    """mixture: a key of EXPERTS; None: a model without."""
    if mixture is None:
        return TINY if tiny else SMALL
    dense, experts = TINY if tiny else model(4, 384, 6, 6, 768, 4096, 512), EXPERTS[mixture]
    width = 2 * dense.mlp.ffn // experts["experts.per_token"]
    return from_fields(
        "mixtral", fields_of(dense) | experts | {"mlp.ffn": width, "experts.ffn": width}
    )


def add_mixture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mixture",
        nargs="?",
        const="coarse",
        choices=EXPERTS,
        help="of experts, in place of a dense model",
    )


Step = Callable[[], None]


def batch(config: ModelConfig, rows: int, device: torch.device = CPU) -> Microbatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        0, config.vocab, (rows, config.max_positions + 1), generator=generator
    ).to(device)
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def ours(
    config: ModelConfig,
    dtype: str,
    rows: int,
    device: torch.device = CPU,
    *,
    optimizer: OptimizerOptions | None = None,
    **options: Any,
) -> Step:
    layout = Layout(stage_layers=(config.layer_count,))
    grid = make_grid(layout, 1, device, experts=config.experts.count > 0)
    own = ModelOptions(dtype=dtype, vocab_divisor=1, **options)
    engine = Engine(config, grid, own, optimizer or OptimizerOptions())
    init_weights(engine, 0.02, 0)
    if own.lora is not None:
        init_adapters(engine, seed=0)
    data = batch(config, rows, device)
    return lambda: engine.train_step([data], 1e-4) and None


def transformers_step(
    config: ModelConfig,
    dtype: str,
    rows: int,
    device: torch.device = CPU,
    *,
    compiled: bool = False,
    masters: bool = False,
    lora: LoRA | None = None,
) -> Step:
    """compiled: each layer, as ours are. masters: weights are float32, and autocast computes in dtype. lora: adapters by peft,
    which alone are trained."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    experts = config.experts
    of_mixture = {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "sliding_window": None,
    }
    settings = (MixtralConfig if experts.count else LlamaConfig)(
        **(of_mixture if experts.count else {}),
        hidden_size=config.hidden, intermediate_size=config.mlp.ffn, num_hidden_layers=config.layer_count, vocab_size=config.vocab,
        num_attention_heads=config.attention.heads, num_key_value_heads=config.attention.kv_heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_embeddings, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    kind = MixtralForCausalLM if experts.count else LlamaForCausalLM
    with device:  # where random weights are drawn at once
        network = kind(settings).to(torch.float32 if masters else getattr(torch, dtype))
    layers = network.model.layers
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        words = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": "all-linear"}
        network = get_peft_model(network, LoraConfig(**words))
    for layer in layers if compiled else ():
        layer.compile()
    data = batch(config, rows, device)
    precision = torch.autocast(device.type, getattr(torch, dtype), enabled=masters)

    def loss() -> torch.Tensor:
        with precision:
            logits = network(data.tokens).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), data.labels.flatten()
        )

    return _plain_step(network, loss)


def core_step(config: ModelConfig, dtype: str, rows: int, device: torch.device = CPU) -> Step:
    """A step of Megatron core. On a GPU its layers are Transformer Engine's if that is installed."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    on_gpu = device.type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    if on_gpu:
        model_parallel_cuda_manual_seed(1)
    else:
        from tests.megatron_oracle import run_on_cpu

        run_on_cpu().__enter__()
    unfused = (
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
    )
    experts = config.experts
    of_mixture = {
        "num_moe_experts": experts.count, "moe_ffn_hidden_size": experts.ffn, "moe_router_topk": experts.per_token,
        "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    settings = TransformerConfig(
        **(of_mixture if experts.count else {}),
        num_layers=config.layer_count, hidden_size=config.hidden, num_attention_heads=config.attention.heads,
        ffn_hidden_size=config.mlp.ffn,
        num_query_groups=config.attention.kv_heads, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
        bf16=dtype == "bfloat16", params_dtype=getattr(torch, dtype),
        use_cpu_initialization=True, persist_layer_norm=False, apply_rope_fusion=False, **dict.fromkeys(unfused, False),
    )  # fmt: skip
    if on_gpu and has_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(experts.count or None)
    else:
        spec = get_gpt_layer_local_spec(experts.count or None, normalization="RMSNorm")
    network = GPTModel(
        settings, spec, config.vocab, config.max_positions, position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_embeddings,
    ).to(getattr(torch, dtype)).to(device)  # fmt: skip
    data = batch(config, rows, device)
    positions = torch.arange(config.max_positions, device=device).expand(rows, -1)
    length = config.max_positions
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
    return _plain_step(
        network, lambda: network(data.tokens, positions, mask, labels=data.labels).float().mean()
    )


def _plain_step(network: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Step:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step
