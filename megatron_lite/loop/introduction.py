"""Log lines at the start of a run: its model and ranks, its start, and the choices that no flag made."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from formats.wording import counted
from megaconv.megatron.arguments.notices import run_notices
from megaconv.planning.gpus import gpu_of
from megatron_lite.checkpoint.adapter_runs import AdapterStart
from megatron_lite.checkpoint.restore import Start
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer
from megatron_lite.loop.run import Run
from megatron_lite.models.lora.peft_limits import notice_of_peft, notice_of_rows
from megatron_lite.models.lora.whole import WORDS
from megatron_lite.settings.architecture import model_type
from megatron_lite.settings.config import flags
from megatron_lite.settings.kinds import of_other_kinds
from megatron_lite.settings.optimization import PRECISION_FLAGS
from megatron_lite.settings.options import LoRA

SHOWN = 5
"""Trained rows whose tokens are printed."""


def introduce(
    run: Run,
    start: Start | None,
    adapters: AdapterStart | None,
    tokenizer: Tokenizer,
    former_dtype: str | None,
) -> None:
    """Print the log lines. former_dtype: see prepare.Basis."""
    saves = run.saver is not None
    continues = run.progress.iteration > 0
    arguments = None if start is None else start.arguments
    _introduce_model(run)
    _introduce_device(run)
    _introduce_start(run, start)
    _introduce_evaluations(run)
    if saves and start is not None:
        _point_out(run, start)
    if run.config.mtp_layers and not run.engine.criterion.trains_mtp:
        _introduce_resting(run, start)
    if not run.engine.criterion.trains_head and not run.config.tie_embeddings:
        run.say("the head for words keeps its values, without gradients and optimizer state")
    if adapters is not None:
        _introduce_adapters(run, adapters)
        _introduce_rows(run, adapters.options, tokenizer)
    _mention(run, start, tokenizer)
    if arguments:
        for name, then, now in _changes(run, arguments):
            run.say(f"changed since the checkpoint: {name} {then} -> {now}")
    if continues and former_dtype is not None:
        _mention_precision(run, former_dtype)


def _introduce_resting(run: Run, start: Start | None) -> None:
    run.say(
        "MTP layers keep their values, without gradients and optimizer state: this objective trains the next token alone"
    )
    if start is not None and start.with_optimizer and run.engine.options.lora is None:
        run.say(
            "their optimizer state in the checkpoint isn't kept: a later run on all layers begins with moments of 0 there"
        )


def _introduce_model(run: Run) -> None:
    config = run.config
    sizes = run.sizes
    options = run.engine.options
    context = f", CP {sizes.cp}" if sizes.cp > 1 else ""
    run.say(f"{run.place}; {sizes.layout}{context}, DP {sizes.dp}")
    only_evaluates = run.settings.training.epochs == 0
    if run.saver is None and not only_evaluates:
        run.say("no --save: nothing of this run will be kept")
    parameters = 0
    for infos in run.engine.infos:
        parameters += sum(prod(info.native.shape) for info in infos)
    shape = f"{counted(config.layer_count, 'layer')} of {config.hidden}"
    state = _bytes_each(run) if options.lora is None else "frozen"
    on_this_rank = f"{parameters:,} parameters on this rank, {state}"
    run.say(f"{config.family}, {shape}, {options.dtype}; {on_this_rank}")


def _introduce_device(run: Run) -> None:
    """Say the figures of a known GPU, as MFU relates to its rate."""
    gpu = gpu_of(str(run.place))
    if run.engine.grid.device.type == "cuda" and gpu is not None:
        run.say(f"data sheet of {gpu.data_sheet}")


def _introduce_start(run: Run, start: Start | None) -> None:
    progress = run.progress
    if start is not None:
        optimizer = "with" if start.with_optimizer else "without"
        run.say(f"weights of {start.path} ({start.header.source}), {optimizer} optimizer state")
    if progress.iteration:
        run.say(
            f"continuing after step {progress.iteration}, {counted(progress.consumed_samples, 'sample')}"
        )


def _introduce_evaluations(run: Run) -> None:
    if not run.settings.training.eval_iters:
        return
    for dataset, what in zip(run.datasets[1:], ("validation", "test"), strict=True):
        if dataset is None:
            run.say(f"no {what} data: this run measures no {what} loss")


def _point_out(run: Run, start: Start) -> None:
    """Print the converter's notices about the model, because the run saves Megatron checkpoints of it."""
    is_megatrons = start.header.layout is not None
    if is_megatrons or run.settings.lora.wanted:
        # The run keeps the implementation of the checkpoint.
        return
    for notice in run_notices(run.config):
        run.say(f"note: {notice}")


def _bytes_each(run: Run) -> str:
    assert run.engine.optimizer is not None
    return (
        f"{run.engine.optimizer.bytes_per_parameter():.2f} bytes each with gradients and optimizer"
    )


_KINDS = {
    (False, False): "LoRA", (True, False): "rsLoRA", (False, True): "DoRA", (True, True): "rsLoRA with DoRA",
}  # fmt: skip
"""(whether rsLoRA, whether DoRA) -> the kind of adapters."""


def _adapter(options: LoRA) -> str:
    """Return a text such as `LoRA of rank 8, alpha 16 on all-linear`."""
    kind = _KINDS[options.rslora, options.dora]
    dropout = f", dropout {options.dropout:g}" if options.dropout else ""
    targets = " ".join(options.targets)
    beside = _beside(options)
    return f"{kind} of rank {options.rank}, alpha {options.alpha:g}{dropout} on {targets}{beside}"


def _beside(options: LoRA) -> str:
    """Return a text such as `, with the head whole`: what is trained beside adapters."""
    found = ""
    if options.whole:
        found += f", with {_named(options.whole)} whole"
    if options.rows:
        tokens = counted(len(options.tokens), "token")
        found += f", with the rows of {tokens} in {_named(module for module, _ in options.rows)}"
    return found


def _named(modules: Iterable[str]) -> str:
    return " and ".join(WORDS[module] for module in modules)


def _introduce_adapters(run: Run, start: AdapterStart) -> None:
    load = run.settings.checkpointing.load
    trained = 0
    for infos in run.engine.trained:
        for info in infos:
            trained += prod(info.native.shape)
    head = ", with the head of scores" if run.config.has("scores") else ""
    adapter = f"{_adapter(start.options)}{head}"
    origin = "fresh" if start.place is None else f"from {start.place}"
    size = f"{trained:,} parameters on this rank, {_bytes_each(run)}"
    run.say(f"{adapter}, {origin}: {size}")
    adapted = {
        name.rpartition(".lora_")[0]
        for infos in run.engine.adapters
        for info in infos
        for name in info.native.parts
    }
    notices = notice_of_peft(run.config, adapted), notice_of_rows(run.config, start.options)
    for notice in filter(None, notices):
        run.say(f"note: {notice}")
    if start.base is not None:
        run.say(f"warning: the adapter was trained on {start.base}, but --load is {load}")


def _introduce_rows(run: Run, options: LoRA, tokenizer: Tokenizer) -> None:
    """Print the first tokens whose rows are trained, and a warning of numbers that the tokenizer doesn't have."""
    tokens = options.tokens
    if not tokens:
        return
    first = [token for token in tokens[:SHOWN] if token < tokenizer.vocab_size]
    texts = ", ".join(f"{token} {tokenizer.spelled([token])!r}" for token in first)
    more = " ..." if len(tokens) > SHOWN else ""
    run.say(f"trained rows: {texts}{more}")
    beyond = [token for token in tokens if token >= tokenizer.vocab_size]
    if beyond:
        run.say(
            f"warning: --lora-trainable-token-indices: the tokenizer has the tokens 0 to {tokenizer.vocab_size - 1}; "
            f"the row of token {beyond[0]} will learn nothing"
        )


def _mention(run: Run, start: Start | None, tokenizer: Tokenizer) -> None:
    """Print choices that no flag made, and a flag without effect."""
    settings, seq = run.settings, run.sizes.seq
    if settings.training.seq_length is None and seq < run.config.max_positions:
        run.say(
            f"sequences of {seq} tokens, though the model is for {run.config.max_positions}: --seq-length takes more"
        )
    if isinstance(tokenizer, NullTokenizer) and settings.data.tokenizer_type is None:
        run.say(f"without a tokenizer: data are token ids below {tokenizer.vocab_size}")
    if start is None and settings.checkpointing.load is not None:
        run.say(f"no checkpoint in {settings.checkpointing.load} yet: starting from random weights")
    optimizer = settings.optimizer
    kept_in = {optimizer.main_grads_dtype, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype}
    narrows = kept_in != {"fp32"}
    if optimizer.use_precision_aware_optimizer and not narrows:
        run.say(
            "note: --use-precision-aware-optimizer alone changes nothing; add --main-grads-dtype, --exp-avg-dtype or --exp-avg-sq-dtype"
        )


def _mention_precision(run: Run, former_dtype: str) -> None:
    dtype = run.engine.options.dtype
    if dtype != former_dtype:
        then, now = (PRECISION_FLAGS.get(one, one) for one in (former_dtype, dtype))
        run.say(f"changed since the checkpoint: precision {then} -> {now}")


def _changes(run: Run, before: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (setting, value in the checkpoint, value now). before: the arguments of the continued run."""
    settings = run.settings
    now: dict[str, Any] = {}
    foreign = of_other_kinds(model_type(settings, run.config))
    for name, (subject, field) in flags().items():
        if field.metadata["samples"] and name not in foreign:
            value = getattr(getattr(settings, subject), name)
            now[name] = list(value) if isinstance(value, tuple) else value
    now["fp8_format"] = settings.precision.fp8_format
    now["global_batch_size"] = run.sizes.batch.full
    now["seq_length"] = run.sizes.seq
    for name, value in now.items():
        if name in before and before[name] != value:
            yield name, before[name], value
