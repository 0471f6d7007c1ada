"""Times the chunked scans of mixers with a state beside transformers' own, forward and backward, in one thread.

    python benchmarks/scans.py [--repeat 5] [--chunks 64 128]

Needs torch and transformers. A line gives the best processor time of both, and their ratio.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megatron_lite.models.state_space.gated_delta import gated_delta_rule
from megatron_lite.models.state_space.mamba2 import ssd

TOKENS = 2048


def of_mamba() -> list[Tensor]:
    """24 heads of 64, one group, and a state of 128."""
    heads, width, state = 24, 64, 128
    return [
        torch.randn(1, TOKENS, heads, width),
        F.softplus(torch.randn(1, TOKENS, heads) - 4),
        -torch.rand(heads) * 15 - 1,
        torch.randn(1, TOKENS, 1, state),
        torch.randn(1, TOKENS, 1, state),
        torch.randn(heads),
    ]


def of_delta() -> list[Tensor]:
    """8 heads, keys of 64 and values of 128."""
    heads, keys, values = 8, 64, 128
    q, k = (F.normalize(torch.randn(1, TOKENS, heads, keys), dim=-1) for _ in range(2))
    decay = -F.softplus(torch.randn(1, TOKENS, heads))
    v = torch.randn(1, TOKENS, heads, values)
    return [q, k, v, decay, torch.rand(1, TOKENS, heads)]


def theirs_mamba(chunk: int, *inputs: Tensor) -> Tensor:
    x, dt, a, b, c, d = inputs
    found: Tensor = mamba2_chunk_scan(x, dt, a, b, c, chunk, D=d)
    return found


def theirs_delta(chunk: int, *inputs: Tensor) -> Tensor:
    found: Tensor = torch_chunk_gated_delta_rule(*inputs, chunk_size=chunk)[0]
    return found


def first_of(scan: Any, chunk: int, *inputs: Tensor) -> Tensor:
    found: Tensor = scan(*inputs, chunk=chunk)[0]
    return found


def best(function: Callable[..., Tensor], inputs: list[Tensor], repeat: int) -> float:
    """Return the shortest of several processor times in seconds, which other programs change little."""
    times = []
    for _ in range(repeat):
        leaves = [each.detach().requires_grad_() for each in inputs]
        start = time.process_time()
        function(*leaves).sum().backward()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases: list[tuple[str, Any, Any, list[Tensor]]] = [
        ("Mamba 2", ssd, theirs_mamba, of_mamba()),
        ("gated delta rule", gated_delta_rule, theirs_delta, of_delta()),
    ]
    for name, ours, theirs, inputs in cases:
        for chunk in options.chunks:
            own = best(partial(first_of, ours, chunk), inputs, options.repeat)
            other = best(partial(theirs, chunk), inputs, options.repeat)
            print(
                f"{name}, chunk {chunk}: {own:.3f} s, transformers {other:.3f} s, {own / other:.2f}"
            )


if __name__ == "__main__":
    main()
