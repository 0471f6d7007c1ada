"""Whether a run's sizes fit each other; every refusal shows the arithmetic, before anything is started."""

from dataclasses import dataclass

from megaconv.errors import LayoutError, UsageError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import LayerSplit, Layout, split_layers
from megatron_lite.config import Parallel, Settings
from megatron_lite.grid import check_sizes
from megatron_lite.options import ModelOptions
from megatron_lite.schedule import BatchSize, batch_size


@dataclass(frozen=True)
class Sizes:
    """What follows from the flags, the model and the number of processes."""

    layout: Layout
    dp: int
    batch: BatchSize
    micro_batch: int
    seq: int


def work_out(settings: Settings, config: ModelConfig, options: ModelOptions, world: int) -> Sizes:
    """Raises LayoutError or UsageError for anything that can't be."""
    training = settings.training
    check_flags(settings)
    layout = _layout(settings.parallel, config)
    seq, micro = training.seq_length or config.max_positions, training.micro_batch_size
    dp = check_sizes(config, layout, world, options, seq, layout.pp)
    batch = batch_size(training, dp)
    for size in batch.sizes():
        if size < 1 or size % (micro * dp):
            raise UsageError(
                f"a global batch of {size} can't be divided into micro batches of {micro} on {dp} data-parallel ranks: "
                f"it has to be a multiple of {micro} x {dp} = {micro * dp}"
            )
        check_sizes(config, layout, world, options, seq, size // (micro * dp))
    return Sizes(layout, dp, batch, micro, seq)


def _layout(parallel: Parallel, config: ModelConfig) -> Layout:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if min(tp, pp) < 1:
        raise LayoutError(f"tp = {tp}, pp = {pp}: parallel sizes have to be 1 or more")
    split = LayerSplit(
        None, parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers,
        parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split,
        parallel.pipeline_model_parallel_layout,
    )  # fmt: skip
    vpp = _virtual_stages(parallel, config, split)
    return Layout(tp, pp, vpp, stage_layers=split_layers(config.layer_count, pp, vpp, split))


def _virtual_stages(parallel: Parallel, config: ModelConfig, split: LayerSplit) -> int:
    pp, listed = parallel.pipeline_model_parallel_size, split.stages()
    each, count = parallel.num_layers_per_virtual_pipeline_stage, parallel.num_virtual_stages_per_pipeline_rank
    if each is not None and count is not None:
        raise UsageError(
            "give --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank, not both"
        )
    if count is not None:
        return count
    if each is not None:
        if each < 1 or config.layer_count % (pp * each):
            raise LayoutError(
                f"{config.layer_count} layers can't be divided into virtual stages of {each} over {pp} ranks: "
                f"{pp} x {each} = {pp * each} has to divide them"
            )
        return config.layer_count // (pp * each)
    return listed // pp if listed is not None and pp > 1 and listed % pp == 0 else 1


def check_flags(settings: Settings) -> None:
    """What can be judged without the model. Raises UsageError."""
    training, precision, saving = settings.training, settings.precision, settings.checkpointing
    granularity, method = settings.recompute.recompute_granularity, settings.recompute.recompute_method
    positive = {
        "micro_batch_size": training.micro_batch_size,
        "train_iters": training.train_iters, "train_samples": training.train_samples, "eval_interval": training.eval_interval,
        "exit_interval": training.exit_interval, "save_interval": saving.save_interval, "keep_last": saving.keep_last,
        "log_interval": settings.logging.log_interval, "recompute_num_layers": settings.recompute.recompute_num_layers,
    }  # fmt: skip
    for name, value in positive.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} has to be 1 or more")
    refused = [
        (precision.bf16 and precision.fp16, "--bf16 and --fp16 contradict each other"),
        (not (training.train_iters or training.train_samples), "--train-iters (or --train-samples) is missing"),
        (training.train_iters and training.train_samples, "give --train-iters or --train-samples, not both"),
        (saving.save_interval and not saving.save, "--save-interval needs --save"),
        (saving.resume and not saving.save, "--resume continues from --save, which is missing"),
        (granularity == "full" and not method, "--recompute-granularity full needs --recompute-method uniform or block"),
        (method and granularity != "full", "--recompute-method goes with --recompute-granularity full"),
        (training.eval_iters < 0, f"--eval-iters {training.eval_iters} has to be 0 or more"),
    ]  # fmt: skip
    for wrong, message in refused:
        if wrong:
            raise UsageError(message)
