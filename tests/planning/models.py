"""Small models with few kinds of layers, and runs of them."""

from typing import Any

from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields
from megaconv.model.layout import Layout
from megaconv.planning.run import Run

LLAMA = from_fields(
    "llama",
    {
        "layers.count": 8, "hidden": 512, "attention.heads": 8, "attention.kv_heads": 4, "attention.head_dim": 64, "mlp.ffn": 1024,
        "vocab": 4000, "max_positions": 8192, "tie_embeddings": False,
    },
)  # fmt: skip
TIED = from_fields(
    "llama",
    {
        "layers.count": 8, "hidden": 512, "attention.heads": 8, "attention.kv_heads": 4, "attention.head_dim": 64, "mlp.ffn": 1024,
        "vocab": 4000, "max_positions": 8192, "tie_embeddings": True,
    },
)  # fmt: skip
DEEPSEEK = from_fields(
    "deepseek_v3",
    {
        "layers.count": 7, "layers.mlp": ("dense",) * 2 + ("experts",) * 5, "hidden": 256, "attention.heads": 8,
        "attention.kv_heads": 8, "attention.head_dim": 48, "mlp.ffn": 512, "vocab": 4000, "max_positions": 8192,
        "tie_embeddings": False, "latent.kv_rank": 32, "latent.q_rank": 64, "latent.rope_dim": 16, "latent.v_dim": 32,
        "experts.count": 8, "experts.per_token": 2, "experts.ffn": 64, "experts.shared_ffn": 64,
        "experts.router_bias": True, "experts.score": "sigmoid", "mtp_layers": 1,
    },
)  # fmt: skip
MODELS: dict[str, ModelConfig] = {"llama": LLAMA, "tied": TIED, "deepseek": DEEPSEEK}


def run_of(
    config: ModelConfig, tp: int, pp: int, vpp: int, stages: tuple[int, ...], **sizes: Any
) -> Run:
    """A run with 4 data-parallel ranks and, for experts, EP 2."""
    ep = 2 if config.experts.count else 1
    layout = Layout(tp, pp, vpp, ep, 1, stage_layers=stages)
    given = {
        "dp": 4, "seq": 2048, "global_batch": 64, "sequence_parallel": tp > 1, "sharding": "optim",
    }  # fmt: skip
    return Run(config=config, layout=layout, **(given | sizes))
