"""Published rates of text generation. Data for benchmarks/serving.py."""

from dataclasses import dataclass

from benchmarks.published_runs import LLAMA2_7B, LLAMA2_70B
from megaconv.model.config import ModelConfig

GPT_FAST = "https://github.com/pytorch-labs/gpt-fast, README.md (A100 at 330 W)"
TENSORRT = "https://github.com/NVIDIA/TensorRT-LLM, docs/source/performance.md (0.6.1)"

LATENCIES = "https://github.com/NVIDIA/TensorRT-LLM, docs/source/performance.md (0.5)"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One row of a table."""

    name: str
    config: ModelConfig
    gpu: str
    tp: int
    batch: int = 1
    prompt: int
    answer: int
    fp8: bool = False
    rate: float
    """Generated tokens per second, of all sequences together. With a prompt's pass if `with_prompt`."""
    with_prompt: bool = False
    source: str
    fitted: bool = False
    """True if the constants of megaconv/planning/token_time.py are fitted to it."""


def _of_gpt_fast(
    name: str, config: ModelConfig, tp: int, rate: float, *, fitted: bool
) -> Generated:
    return Generated(
        name=name, config=config, gpu="a100", tp=tp, prompt=5, answer=200, rate=rate, source=GPT_FAST, fitted=fitted
    )  # fmt: skip


def _of_tensorrt(
    config: ModelConfig, name: str, tp: int, batch: int, prompt: int, rate: float
) -> Generated:
    return Generated(
        name=name, config=config, gpu="h100", tp=tp, batch=batch, prompt=prompt, answer=2048, fp8=True, rate=rate,
        with_prompt=True, source=TENSORRT,
    )  # fmt: skip


ROWS = (
    _of_gpt_fast("Llama-2 7B", LLAMA2_7B, 1, 104.9, fitted=False),
    _of_gpt_fast("Llama-2 7B", LLAMA2_7B, 2, 168.84, fitted=True),
    _of_gpt_fast("Llama-2 7B", LLAMA2_7B, 4, 254.02, fitted=False),
    _of_gpt_fast("Llama-2 7B", LLAMA2_7B, 8, 328.43, fitted=True),
    _of_gpt_fast("Llama-2 70B", LLAMA2_70B, 2, 21.32, fitted=False),
    _of_gpt_fast("Llama-2 70B", LLAMA2_70B, 4, 38.01, fitted=True),
    _of_gpt_fast("Llama-2 70B", LLAMA2_70B, 8, 62.50, fitted=False),
    _of_tensorrt(LLAMA2_7B, "Llama 7B", 1, 112, 128, 6818),
    _of_tensorrt(LLAMA2_7B, "Llama 7B", 1, 48, 2048, 2740),
    _of_tensorrt(LLAMA2_70B, "Llama 70B", 4, 480, 128, 4 * 1486),
    _of_tensorrt(LLAMA2_70B, "Llama 70B", 2, 64, 2048, 2 * 547),
)


@dataclass(frozen=True)
class FirstToken:
    """The time of a prompt's pass with one sequence."""

    name: str
    config: ModelConfig
    gpu: str
    tp: int
    prompt: int
    fp8: bool
    seconds: float


FIRST_TOKENS = (
    FirstToken("Llama 7B", LLAMA2_7B, "h100", 1, 2048, fp8=True, seconds=0.036),
    FirstToken("Llama 70B", LLAMA2_70B, "h100", 4, 2048, fp8=True, seconds=0.109),
    FirstToken("Llama 7B", LLAMA2_7B, "a100", 1, 2048, fp8=False, seconds=0.133),
    FirstToken("Llama 70B", LLAMA2_70B, "a100", 4, 2048, fp8=False, seconds=0.377),
)
"""First tokens of LATENCIES. None is fitted."""
