"""Whether a run's sizes fit each other; every refusal tells the arithmetic. No torch: it comes before anything starts."""

from dataclasses import dataclass

from megaconv.config import ModelConfig
from megaconv.errors import LayoutError, UsageError
from megaconv.layout import LayerSplit, Layout, split_layers
from megaconv.table import rank_sizes
from megatron_lite.config import Parallel, Settings
from megatron_lite.schedule import BatchSize, batch_size


@dataclass(frozen=True)
class Sizes:
    """What follows from the flags, the model and the number of processes."""

    layout: Layout
    dp: int
    batch: BatchSize
    micro_batch: int
    seq: int

    def microbatches(self, batch: int) -> int:
        """Of one data-parallel rank, for a global batch."""
        return batch // (self.micro_batch * self.dp)


def work_out(settings: Settings, config: ModelConfig, world: int) -> Sizes:
    """Raises LayoutError or UsageError for anything that can't be."""
    parallel, training = settings.parallel, settings.training
    dp = _data_parallel(parallel, world)
    layout = _layout(parallel, config)
    seq = training.seq_length or config.max_positions
    _check_sequence(parallel, config, seq)
    batch = batch_size(training, dp)
    micro = training.micro_batch_size
    if micro < 1:
        raise UsageError(f"--micro-batch-size {micro} has to be 1 or more")
    for size in batch.sizes():
        if size < 1 or size % (micro * dp):
            raise UsageError(
                f"a global batch of {size} can't be cut into micro batches of {micro} on {dp} data-parallel ranks: "
                f"it has to be a multiple of {micro} x {dp} = {micro * dp}"
            )
        count = size // (micro * dp)
        if layout.vpp > 1 and count % layout.pp:
            below, above = count // layout.pp * layout.pp, (count // layout.pp + 1) * layout.pp
            raise LayoutError(
                f"{count} micro batches are not a multiple of {layout.pp} stages, which interleaved stages need: "
                f"use {f'{below} or ' if below else ''}{above} (a global batch of {above * micro * dp})"
            )
    _check_rest(settings)
    return Sizes(layout, dp, batch, micro, seq)


def _data_parallel(parallel: Parallel, world: int) -> int:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if min(tp, pp) < 1:
        raise LayoutError(f"tp = {tp}, pp = {pp}: parallel sizes have to be 1 or more")
    if world % (tp * pp):
        raise LayoutError(
            f"tp x pp = {tp} x {pp} = {tp * pp} doesn't divide the {world} process{'es' * (world > 1)} that were started: "
            f"start {tp * pp} or a multiple of it (torchrun --nproc-per-node)"
        )
    return world // (tp * pp)


def _layout(parallel: Parallel, config: ModelConfig) -> Layout:
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    split = LayerSplit(
        None, parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers,
        parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split,
        parallel.pipeline_model_parallel_layout,
    )  # fmt: skip
    vpp = _virtual_stages(parallel, config, split)
    layout = Layout(tp, pp, vpp, stage_layers=split_layers(config.layers, pp, vpp, split))
    if 0 in layout.stage_layers[1:-1]:
        raise LayoutError(
            f"stages of {'+'.join(map(str, layout.stage_layers))} layers: those in the middle need one or more"
        )
    rank_sizes(config, layout)  # heads, groups of heads and the MLP have to be divided
    return layout


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
        if each < 1 or config.layers % (pp * each):
            raise LayoutError(
                f"{config.layers} layers can't be cut into virtual stages of {each} over {pp} ranks: "
                f"{pp} x {each} = {pp * each} has to divide them"
            )
        return config.layers // (pp * each)
    return listed // pp if listed is not None and pp > 1 and listed % pp == 0 else 1


def _check_sequence(parallel: Parallel, config: ModelConfig, seq: int) -> None:
    tp = parallel.tensor_model_parallel_size
    if config.positions == "learned" and seq > config.max_positions:
        raise UsageError(
            f"--seq-length {seq} is longer than the {config.max_positions} positions that the model has learned"
        )
    if parallel.sequence_parallel and seq % tp:
        raise LayoutError(f"a sequence of {seq} can't be cut over tp = {tp} ranks; choose a multiple of {tp}")


def _check_rest(settings: Settings) -> None:
    training, precision, saving = settings.training, settings.precision, settings.checkpointing
    granularity, method = settings.recompute.recompute_granularity, settings.recompute.recompute_method
    positive = {
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
