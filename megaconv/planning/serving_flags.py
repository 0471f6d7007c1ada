"""The flags that start a planned inference server: of Megatron-LM, of megatron-lite and of vLLM."""

from megaconv.errors import LayoutError
from megaconv.model.sharding import rank_sizes
from megaconv.planning.serving import Serving


def megatron_lm_flags(serving: Serving) -> list[str]:
    """Return the flags for Megatron-LM's text generation. Replicas are started one by one."""
    layout = serving.layout
    found = _flags(
        {
            "--tensor-model-parallel-size": layout.tp,
            "--pipeline-model-parallel-size": layout.pp,
            "--expert-model-parallel-size": layout.ep,
        }
    )
    if serving.config.experts.count and layout.tp > 1:
        # Megatron's default is TP.
        found += ["--expert-tensor-parallel-size", str(layout.etp)]
    return [*found, "--inference-max-seq-length", str(serving.seq)]


def megatron_lite_flags(serving: Serving) -> list[str]:
    """Return the flags for megatron-lite serve and generate; none if they can't serve the layout."""
    layout = serving.layout
    if serving.fp8 or serving.cached != serving.itemsize or serving.sharing > 1:
        return []
    try:
        rank_sizes(serving.config, layout)
    except LayoutError:
        # Its tensor ranks never share a key/value head.
        return []
    sizes = {"--tp": layout.tp, "--pp": layout.pp, "--ep": layout.ep}
    return [*_flags(sizes), "--slots", str(serving.batch), "--max-length", str(serving.seq)]


def vllm_flags(serving: Serving) -> list[str]:
    """Return the flags for vllm serve."""
    layout = serving.layout
    found = _flags(
        {
            "--tensor-parallel-size": layout.tp,
            "--pipeline-parallel-size": layout.pp,
            "--data-parallel-size": serving.dp if _as_one_server(serving) else 1,
        }
    )
    if layout.ep > 1:
        found.append("--enable-expert-parallel")
    if serving.fp8:
        found += ["--quantization", "fp8"]
    if serving.cached < serving.itemsize:
        found += ["--kv-cache-dtype", "fp8"]
    return [*found, "--max-model-len", str(serving.seq), "--max-num-seqs", str(serving.batch)]


def _as_one_server(serving: Serving) -> bool:
    """Return whether vLLM's replicas are one server. With experts, replicas of one server always share them."""
    return not serving.config.experts.count or serving.sharing == serving.dp


def _flags(sizes: dict[str, int]) -> list[str]:
    """Return the flags of the sizes above 1."""
    found = list[str]()
    for flag, size in sizes.items():
        if size > 1:
            found += [flag, str(size)]
    return found
