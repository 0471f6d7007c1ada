"""The flags of Megatron-LM and megatron_lite that start a planned run. Both have the same names."""

from collections.abc import Iterator

from megaconv.model.layout import split_arguments
from megaconv.planning.run import Run


def shared_flags(run: Run) -> list[str]:
    """Return the flags of the layout that both trainers know."""
    return [*_sizes(run), *_stages(run), *_batch(run)]


def megatron_lm_flags(run: Run) -> list[str]:
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
    return [*shared_flags(run), *sharding, *_overlap(run), *again]


def megatron_lite_flags(run: Run) -> list[str]:
    """Return the flags for megatron-lite pretrain."""
    sharding = ["--use-distributed-optimizer"] if run.sharding != "no_shard" else []
    if run.sharding in ("optim_grads", "optim_grads_params"):
        sharding += ["--data-parallel-sharding-strategy", run.sharding]
    return [*shared_flags(run), *sharding, *_overlap(run), *_recompute(run)]


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
