"""The declaration of Kimi delta attention. Its cache is that of gated delta nets, with as many key heads as heads."""

from dataclasses import replace
from typing import TYPE_CHECKING

from megaconv.planning import mixers
from megatron_lite.models.mixers.delta_net import DELTA_NET

if TYPE_CHECKING:
    from megatron_lite.models.mixers.kimi_delta_attention import KimiDeltaAttention


def _module() -> "type[KimiDeltaAttention]":
    from megatron_lite.models.mixers.kimi_delta_attention import KimiDeltaAttention

    return KimiDeltaAttention


_MATRICES = (
    *("out_proj", "linear_qkvb", "linear_gates_down"),
    *("linear_forget_up", "linear_gate_up"),
)
KIMI_DELTA = replace(
    DELTA_NET, module=_module, matrices=lambda _: _MATRICES, cost=mixers.KIMI_DELTA
)
