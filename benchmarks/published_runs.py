"""Published training runs: what is known of their sizes, and their time of a step. Data for benchmarks/planner.py.

A size that a publication leaves out is None: the estimate then takes the value with the shortest step that fits.
"""

from dataclasses import dataclass
from typing import Any

from megaconv.model.config import ModelConfig
from megaconv.model.fields import from_fields

TABLE = "https://github.com/NVIDIA/Megatron-LM, images/model_table.png (6144 H100)"
KORTHIKANTI = "arXiv:2205.05198, table 5"
NEMO = "https://github.com/NVIDIA/NeMo, docs/source/performance/performance_summary.md (NeMo 24.07)"
TITAN = "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
ZOO = "https://github.com/yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3/readme.md"


UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One run."""

    name: str
    config: ModelConfig
    gpus: int
    gpu: str = "h100"
    tp: int = 1
    pp: int = 1
    vpp: int | None = 1
    ep: int = 1
    cp: int = 1
    micro_batch: int | None = 1
    global_batch: int
    seq: int = 4096
    fp8: bool = False
    sharding: str = "optim"
    recompute: str | None = UNKNOWN
    dispatcher: str = "alltoall"
    overlaps_experts: bool = False
    tokens_per_second: float | None = None
    """Tokens per second of one GPU, as published."""
    tflops: float | None = None
    """Operations of the model per second of one GPU, as published, in units of 1e12. Attention is not halved."""
    step: float | None = None
    """Seconds of a step, as published."""
    source: str
    fitted: bool = False
    """True if the constants of megaconv/planning/rates.py are fitted to it."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        tokens = self.global_batch * self.seq
        if self.step is not None:
            return self.step
        if self.tokens_per_second is not None:
            return tokens / self.tokens_per_second / self.gpus
        assert self.tflops is not None
        return tokens * operations(self.config, self.seq) / self.gpus / (self.tflops * 1e12)


def operations(config: ModelConfig, seq: int) -> float:
    """Return the operations per token, forward and backward: 6 N of the weights in use, and 12 L h s of attention."""
    attention, hidden, experts = config.attention, config.hidden, config.experts
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    gates = 3 if config.mlp.gated else 2
    ffn = experts.per_token * experts.ffn if experts.count else config.mlp.ffn
    layer = hidden * (2 * q + 2 * kv) + gates * hidden * ffn
    weights = config.layer_count * layer + config.vocab * hidden
    return 6.0 * weights + 12.0 * config.layer_count * q * seq


def decoder(
    family: str, hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, **fields: Any
) -> ModelConfig:
    """Return a model of these sizes."""
    return from_fields(
        family,
        {
            "layers.count": layers, "hidden": hidden, "attention.heads": heads, "attention.kv_heads": kv,
            "attention.head_dim": hidden // heads, "mlp.ffn": ffn, "vocab": vocab, "max_positions": 131072,
            "tie_embeddings": False, **fields,
        },
    )  # fmt: skip


def gpt(hidden: int, layers: int, heads: int, vocab: int, *, tied: bool = False) -> ModelConfig:
    """Return a GPT with four times the width in its MLP."""
    fields = {"tie_embeddings": tied, "mlp.gated": False, "mlp.activation": "gelu"}
    return decoder("gpt2", hidden, layers, heads, heads, 4 * hidden, vocab, **fields)


LLAMA2_7B = decoder("llama", 4096, 32, 32, 32, 11008, 32000)
LLAMA2_13B = decoder("llama", 5120, 40, 40, 40, 13824, 32000)
LLAMA2_70B = decoder("llama", 8192, 80, 64, 8, 28672, 32000)
LLAMA3_8B = decoder("llama", 4096, 32, 32, 8, 14336, 128256)
LLAMA3_70B = decoder("llama", 8192, 80, 64, 8, 28672, 128256)
LLAMA3_405B = decoder("llama", 16384, 126, 128, 8, 53248, 128256)
NEMOTRON_340B = decoder(
    "nemotron", 18432, 96, 96, 8, 73728, 256000, **{"mlp.gated": False, "mlp.activation": "relu2"}
)
GPT3_175B = gpt(12288, 96, 96, 51200, tied=True)
MIXTRAL_8X7B = decoder(
    "mixtral", 4096, 32, 32, 8, 14336, 32000,
    **{"layers.mlp": ("experts",) * 32, "experts.count": 8, "experts.per_token": 2, "experts.ffn": 14336},
)  # fmt: skip
QWEN3_235B = decoder(
    "qwen3_moe", 4096, 94, 64, 4, 12288, 151936,
    **{
        "attention.head_dim": 128, "attention.qk_norm": True, "layers.mlp": ("experts",) * 94, "experts.count": 128,
        "experts.per_token": 8, "experts.ffn": 1536,
    },
)  # fmt: skip
DEEPSEEK_V3 = decoder(
    "deepseek_v3", 7168, 61, 128, 128, 18432, 129280,
    **{
        "attention.head_dim": 192, "latent.kv_rank": 512, "latent.q_rank": 1536, "latent.rope_dim": 64, "latent.v_dim": 128,
        "layers.mlp": ("dense",) * 3 + ("experts",) * 58, "experts.count": 256, "experts.per_token": 8,
        "experts.ffn": 2048, "experts.shared_ffn": 2048, "experts.router_bias": True, "experts.groups": 8, "experts.group_topk": 4,
        "experts.score": "sigmoid",
        "mtp_layers": 1,
    },
)  # fmt: skip

_TABLE = (
    ("1.7B", 2048, 24, 16, 1, 1, 48, 192, 408.8),
    ("7.1B", 4096, 30, 32, 2, 1, 96, 192, 465.9),
    ("16B", 6144, 32, 48, 4, 1, 192, 192, 489.1),
    ("32B", 7168, 48, 56, 8, 1, 384, 192, 459.6),
    ("70B", 8192, 84, 64, 8, 2, 768, 384, 419.7),
    ("119B", 10240, 92, 80, 8, 4, 1536, 768, 420.5),
    ("177B", 12288, 96, 96, 8, 6, 2304, 1152, 432.8),
    ("314B", 16384, 96, 128, 8, 8, 3072, 1536, 474.4),
    ("462B", 18432, 112, 144, 8, 16, 6144, 3072, 459.9),
)
"""(name, width, layers, heads, tp, pp, GPUs, sequences, TFLOP/s)."""
_SMALL_GPTS = tuple(
    Published(
        name=f"GPT {name}", config=gpt(hidden, layers, heads, 131072), tp=tp, pp=pp, vpp=None, gpus=gpus,
        global_batch=batch, micro_batch=None, tflops=tflops, source=TABLE, fitted=number % 2 == 0,
    )
    for number, (name, hidden, layers, heads, tp, pp, gpus, batch, tflops) in enumerate(_TABLE)
)  # fmt: skip

_A100 = (
    ("22B", 6144, 48, 64, 1, 1, 4, 4, 8, 1.10),
    ("175B", 12288, 96, 96, 8, 3, 1, 64, 64, 13.75),
    ("530B", 20480, 105, 128, 35, 3, 1, 280, 280, 37.83),
    ("1T", 25600, 128, 160, 64, 1, 1, 512, 512, 71.49),
)
"""(name, width, layers, heads, pp, vpp, microbatch, sequences, GPUs, seconds)."""
_LARGE_GPTS = tuple(
    Published(
        name=f"GPT {name} on A100", config=gpt(hidden, layers, heads, 51200, tied=True), gpu="a100", tp=8, pp=pp, vpp=vpp,
        gpus=gpus, micro_batch=micro, global_batch=batch, seq=2048, recompute="selective", step=seconds,
        source=KORTHIKANTI,
    )
    for name, hidden, layers, heads, pp, vpp, micro, batch, gpus, seconds in _A100
)  # fmt: skip

_NEMO = (
    ("GPT-3 175B", GPT3_175B, 128, 256, 1, 2048, 4, 8, 1, 6, 726),
    ("GPT-3 175B", GPT3_175B, 512, 2048, 2, 2048, 4, 8, 1, 6, 782),
    ("Llama-2 7B", LLAMA2_7B, 8, 128, 1, 4096, 1, 1, 1, 1, 16847),
    ("Llama-2 13B", LLAMA2_13B, 16, 128, 1, 4096, 1, 4, 1, 10, 8646),
    ("Llama-2 70B", LLAMA2_70B, 64, 128, 1, 4096, 4, 4, 1, 20, 1707),
    ("Nemotron-4 340B", NEMOTRON_340B, 128, 32, 1, 4096, 8, 8, 1, 12, 322),
    ("Llama-3 8B", LLAMA3_8B, 8, 128, 1, 8192, 1, 1, 2, 1, 12036),
    ("Llama-3 70B", LLAMA3_70B, 64, 128, 1, 8192, 4, 4, 2, 5, 1533),
)
"""(name, model, GPUs, sequences, microbatch, tokens, tp, pp, cp, vpp, tokens per second of a GPU), all in FP8."""
_IN_FP8 = tuple(
    Published(
        name=f"{name} in FP8, {gpus} GPUs", config=config, gpus=gpus, global_batch=batch, micro_batch=micro, seq=seq, tp=tp,
        pp=pp, cp=cp, vpp=vpp, fp8=True, tokens_per_second=speed, source=NEMO, fitted=number % 2 == 0,
    )
    for number, (name, config, gpus, batch, micro, seq, tp, pp, cp, vpp, speed) in enumerate(_NEMO)
)  # fmt: skip

RUNS = (
    *_SMALL_GPTS,
    *_LARGE_GPTS,
    *_IN_FP8,
    Published(
        name="Llama-3 8B, FSDP", config=LLAMA3_8B, gpus=8, global_batch=16, micro_batch=2, seq=8192,
        sharding="optim_grads_params", recompute="selective", tokens_per_second=6667, source=TITAN,
    ),
    Published(
        name="Llama-3 8B, FSDP", config=LLAMA3_8B, gpus=128, global_batch=256, micro_batch=2, seq=8192,
        sharding="optim_grads_params", recompute="selective", tokens_per_second=6514, source=TITAN,
    ),
    Published(
        name="Llama-3 405B", config=LLAMA3_405B, gpus=8192, tp=8, pp=16, vpp=None, global_batch=2048, seq=8192,
        tflops=430, source="arXiv:2407.21783, table 4",
    ),
    Published(
        name="Llama-3 405B", config=LLAMA3_405B, gpus=16384, tp=8, pp=16, vpp=None, global_batch=2048, seq=8192,
        tflops=400, source="arXiv:2407.21783, table 4",
    ),
    Published(
        name="Nemotron-4 340B", config=NEMOTRON_340B, gpus=1536, tp=8, pp=12, vpp=8, global_batch=768, step=10.3,
        source="arXiv:2406.11704, table 2",
    ),
    Published(
        name="Nemotron-4 340B", config=NEMOTRON_340B, gpus=6144, tp=8, pp=12, vpp=8, global_batch=2304, step=8.0,
        source="arXiv:2406.11704, table 2",
    ),
    Published(
        name="Nemotron-4 340B", config=NEMOTRON_340B, gpus=128, tp=8, pp=8, vpp=12, global_batch=32, step=4.77,
        source="NGC, nemotron340b-dgxc-benchmarking-a (NeMo 24.11, bf16)",
    ),
    Published(
        name="Mixtral 8x7B", config=MIXTRAL_8X7B, gpus=64, ep=8, pp=4, vpp=8, global_batch=256, tflops=468,
        source="https://github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md (core 0.9)",
    ),
    Published(
        name="Qwen3 235B", config=QWEN3_235B, gpus=256, tp=2, ep=32, pp=8, vpp=4, global_batch=2048, recompute="selective",
        dispatcher="flex", step=19.7, source=ZOO,
    ),
    Published(
        name="Qwen3 235B, overlapped", config=QWEN3_235B, gpus=256, tp=2, ep=32, pp=8, vpp=4, global_batch=2048,
        recompute="selective", dispatcher="flex", overlaps_experts=True, step=17.6, source=ZOO,
    ),
    Published(
        name="DeepSeek-V3", config=DEEPSEEK_V3, gpu="h800", gpus=2048, ep=64, pp=16, global_batch=15360, fp8=True,
        dispatcher="flex", overlaps_experts=True, step=180_000 * 3600 / 2048 * 15360 * 4096 / 1e12,
        source="arXiv:2412.19437: 180,000 GPU hours for 1e12 tokens; exchange of tokens overlapped",
    ),
)  # fmt: skip
