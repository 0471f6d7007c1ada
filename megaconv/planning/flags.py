"""The flags of Megatron-LM and megatron_lite that start a planned run. Both have the same names."""

from collections.abc import Iterator

from megaconv.errors import LayoutError
from megaconv.model.layout import split_arguments
from megaconv.model.sharding import rank_sizes
from megaconv.planning.run import Run

PRECISIONS = {"bfloat16": "--bf16", "float16": "--fp16"}
"""Dtype of a run -> its flag. Without one, Megatron-LM trains in float32."""


def shared_flags(run: Run, *, fp8: bool) -> list[str]:
    """Return the flags of the layout and the precision that both trainers know."""
    return [*_sizes(run), *_stages(run), *_batch(run), *_precision(run, fp8=fp8)]


def megatron_lm_flags(run: Run, *, fp8: bool = False) -> list[str]:
    """Return the flags for Megatron-LM's pretrain_gpt.py."""
    sharding = ["--use-distributed-optimizer"] if run.sharding != "no_shard" else []
    if run.sharding in ("optim_grads", "optim_grads_params"):
        sharding = [
            "--use-megatron-fsdp",
            "--data-parallel-sharding-strategy",
            run.sharding,
            *sharding,
        ]
    if run.dispatcher == "flex" and run.layout.ep > 1:
        sharding += ["--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
    if run.overlaps_experts:
        sharding.append("--overlap-moe-expert-parallel-comm")
    again = list(_recompute(run))
    if run.recompute.granularity == "selective":
        modules = ["layernorm", "moe_act"] if run.config.experts.count else ["layernorm"]
        again += ["--recompute-modules", *modules]
    return [*shared_flags(run, fp8=fp8), *sharding, *_overlap(run), *again]


def megatron_lite_flags(run: Run, *, fp8: bool = False, lora_rank: int = 0) -> list[str]:
    """Return the flags for megatron-lite pretrain; none if it can't shard the model so. lora_rank: of adapters; 0: none."""
    if why_not_megatron_lite(run, fp8=fp8, adapters=lora_rank > 0) is not None:
        return []
    adapters = ["--lora-rank", str(lora_rank)] if lora_rank else []
    sharding = ["--use-distributed-optimizer"] if run.sharding != "no_shard" else []
    if run.sharding in ("optim_grads", "optim_grads_params"):
        sharding += ["--data-parallel-sharding-strategy", run.sharding]
    shared = shared_flags(run, fp8=fp8)
    return [*shared, *adapters, *sharding, *_overlap(run), *_recompute(run)]


def why_not_megatron_lite(run: Run, *, fp8: bool, adapters: bool) -> str | None:
    """Return the reason why megatron-lite can't train so, or None. Its tensor ranks never share a key/value head."""
    if fp8 and adapters:
        return "adapters keep the model's precision; leave --fp8 out"
    try:
        rank_sizes(run.config, run.layout)
    except LayoutError as error:
        return str(error)
    return None


def _precision(run: Run, *, fp8: bool) -> Iterator[str]:
    if run.dtype in PRECISIONS:
        yield PRECISIONS[run.dtype]
    if fp8:
        yield from ("--fp8-format", "hybrid")


def _overlap(run: Run) -> Iterator[str]:
    """Yield the flags with which exchanges of gradients and parameters hide behind passes, as the estimate assumes."""
    if run.replicas > 1 and run.overlaps_reduce:
        yield "--overlap-grad-reduce"
        if run.sharding != "no_shard" and run.overlaps_gather:
            yield "--overlap-param-gather"


def _sizes(run: Run) -> Iterator[str]:
    layout = run.layout
    sizes = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": run.cp,
        "--expert-model-parallel-size": layout.ep,
    }
    for flag, size in sizes.items():
        if size > 1:
            yield from (flag, str(size))
    if run.config.experts.count and layout.tp > 1:
        # Megatron's default is TP.
        yield from ("--expert-tensor-parallel-size", str(layout.etp))
    if run.sequence_parallel:
        yield "--sequence-parallel"


def _stages(run: Run) -> Iterator[str]:
    if run.layout.pp == 1:
        return
    for name, value in split_arguments(run.layout).items():
        if value is None or value is False:
            continue
        if name == "pipeline_model_parallel_layout":
            # The layers that predict further tokens are on the last stage.
            value = f"{value.removesuffix('L')}{'m' * run.config.mtp_layers}L"
        yield from (f"--{name.replace('_', '-')}", str(value))


def _batch(run: Run) -> Iterator[str]:
    yield from ("--micro-batch-size", str(run.micro_batch))
    yield from ("--global-batch-size", str(run.global_batch))
    yield from ("--seq-length", str(run.seq))


def _recompute(run: Run) -> Iterator[str]:
    granularity = run.recompute.granularity
    if granularity is None:
        return
    yield from ("--recompute-granularity", granularity)
    if granularity == "full":
        yield from ("--recompute-method", run.recompute.method)
        yield from ("--recompute-num-layers", str(run.recompute.layers))
