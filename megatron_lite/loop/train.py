"""The training loop: data, step, log, evaluation, save, and every way in which a run can end."""

import math
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch

from formats import rank_files
from megaconv.model.config import ModelConfig
from megatron_lite.checkpoint import amax
from megatron_lite.checkpoint.adapter_runs import adapter_snapshot
from megatron_lite.checkpoint.rank_state import rank_snapshot
from megatron_lite.checkpoint.saver import Saver
from megatron_lite.checkpoint.snapshot import Snapshot, dist_snapshot
from megatron_lite.checkpoint.state import Progress, common_state
from megatron_lite.data.batches import GlobalBatches, prefetch
from megatron_lite.data.samples import Dataset
from megatron_lite.engine import Engine, StepReport
from megatron_lite.loop import plot
from megatron_lite.loop.failure import TrainingError
from megatron_lite.loop.garbage import Garbage
from megatron_lite.loop.launch import Place, Stop
from megatron_lite.loop.log import METRICS, Meter, Sink, further, line
from megatron_lite.loop.model_types import Feeder, ModelType, type_of
from megatron_lite.loop.profiling import make_profile
from megatron_lite.loop.schedule import Rates, Schedule
from megatron_lite.loop.tasks import TASKS, Exam
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes


@dataclass
class Run:
    """Everything that a rank needs to train, and how far it has come."""

    settings: Settings
    config: ModelConfig
    sizes: Sizes
    dropouts: Mapping[str, float]
    place: Place
    engine: Engine
    datasets: list[Dataset | None]
    """For training, evaluation, test."""
    vocab: int
    """Of the tokenizer."""
    schedule: Schedule
    meter: Meter
    saver: Saver | None
    sinks: list[Sink]
    stop: Stop
    progress: Progress = field(default_factory=Progress)
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    """Steps whose gradients weren't finite."""
    empty: int = 0
    """Steps without a label that counts, which changed nothing either."""
    interval: list[StepReport] = field(default_factory=list)
    """Steps since the last log line that changed something."""
    saved: int | None = None
    """The iteration of the last save."""
    exam: Exam | None = None
    """Of a run on a task."""
    examined: int | None = None
    """The iteration that was measured last."""

    def say(self, text: str) -> None:
        self.place.say(text)

    @property
    def kind(self) -> ModelType:
        return type_of(self.settings, self.config)

    @property
    def scheduled(self) -> int:
        """Samples at which learning rate and weight decay stand.

        Where lengths are iterations, all of them count as if they had had the present batch: schedules go on where they were
        though the batch has changed.
        """
        progress = self.progress
        if self.settings.training.train_samples is not None:
            return progress.scheduled_samples
        skipped = progress.consumed_samples - progress.scheduled_samples
        return max(0, progress.iteration * self.sizes.batch.full - skipped)

    @property
    def rows(self) -> int:
        """Sequences of a sample."""
        task = self.settings.tasks.task
        return TASKS[task].rows if task is not None else 2 if self.settings.dpo.dpo else 1

    @property
    def feeder(self) -> Feeder:
        grid = self.engine.grid
        return Feeder(self.kind, self.settings, grid.device, grid.dp, grid.dp_rank)

    def batches(self, dataset: Dataset) -> GlobalBatches:
        grid = self.engine.grid
        return GlobalBatches(
            dataset, self.sizes.micro_batch, grid.dp_rank, grid.dp, self.vocab, self.kind.tokens
        )  # fmt: skip


def total_samples(settings: Settings, sizes: Sizes, progress: Progress = Progress()) -> int:  # noqa: B008  # frozen
    """That the run will have seen at its end. Iterations are iterations, also of a run whose batch has changed meanwhile."""
    training = settings.training
    left = max(0, (training.train_iters or 0) - progress.iteration)
    return training.train_samples or progress.consumed_samples + left * sizes.batch.full


def evaluations(settings: Settings) -> int:
    """How many there will be."""
    return (settings.training.train_iters or 0) // settings.training.eval_interval + 1


def train(run: Run) -> None:
    """Until the end, or until something asks to stop; saves then. Raises TrainingError for a loss that is no number."""
    train_data = run.datasets[0]
    assert train_data is not None
    feeder, started, why = run.feeder, time.monotonic(), None
    limit = run.settings.training.exit_duration_in_mins
    garbage = Garbage(run.settings.training)
    profile = make_profile(run.settings.logging, run.settings.checkpointing.save, run.place.rank, run.place.device)
    garbage.start()
    run.meter.restart()
    steps = list(_steps(run))
    if not steps and run.settings.training.epochs != 0:
        run.say(
            f"nothing left: the run has made its {run.progress.iteration} steps, {run.progress.consumed_samples} samples"
        )
    for consumed, batch in prefetch(run.batches(train_data), iter(steps)):
        rates = run.schedule.at(run.scheduled)
        time_is_up = run.place.rank == 0 and limit is not None and time.monotonic() - started > limit * 60
        profile.after(run.progress.iteration)
        signals = (run.stop.requested, time_is_up)
        report = run.engine.train_step(
            feeder.microbatches(batch), rates.lr, rates.weight_decay, signals, rates.decoupled_lr
        )
        _check(run, report)
        _advance(run, report, run.sizes.batch.at(consumed))
        if run.place.heartbeat is not None:
            run.place.heartbeat.step(run.progress.iteration)
        garbage.after(run.progress.iteration)
        _check_replicas(run)
        _log(run, report, rates, last=consumed == steps[-1][0])
        if run.saver is not None:
            run.saver.check()
        why = _reason_to_end(run, report)
        if why is not None:
            break
        _evaluate_when_due(run, garbage)
        _end_epoch_when_due(run, garbage)
        _save_when_due(run)
    profile.end()
    garbage.end()
    _finish(run, why)


def _steps(run: Run) -> Iterator[tuple[int, int]]:
    """(samples consumed before, batch size) of every step that is left."""
    consumed, total = run.progress.consumed_samples, total_samples(run.settings, run.sizes, run.progress)
    while consumed < total:
        size = run.sizes.batch.at(consumed)
        yield consumed, size
        consumed += size


def _check(run: Run, report: StepReport) -> None:
    if run.settings.training.no_check_for_nan_in_loss_and_grad:
        return
    step = run.progress.iteration + 1
    what = f"the loss is {report.loss}" if not math.isfinite(report.loss) else None
    if what is None and report.skipped and not report.empty and not run.settings.precision.fp16:
        what = f"the norm of the gradients is {report.grad_norm}"
    if what is not None and not (report.skipped and run.settings.precision.fp16):
        raise TrainingError(
            f"step {step}: {what}; lower --lr or look at the data of samples {run.progress.consumed_samples} and after "
            "(--no-check-for-nan-in-loss-and-grad continues regardless)"
        )


def _check_replicas(run: Run) -> None:
    """Raises TrainingError on the ranks that hold a parameter that isn't everywhere the same."""
    interval = run.settings.training.check_weight_hash_across_dp_replicas_interval
    if interval is None or run.progress.iteration % interval:
        return
    found = run.engine.differing()
    if found:
        first, ranks = found[0], ", ".join(map(str, found[0].ranks))
        more = f" and {len(found) - 1} more parameters" if len(found) > 1 else ""
        raise TrainingError(
            f"step {run.progress.iteration}: {first.name}{more} of data-parallel ranks {ranks} is not what rank 0 has: "
            "a device or a link computed something else; go on from the last checkpoint on other machines"
        )


def _advance(run: Run, report: StepReport, size: int) -> None:
    progress, tokens = run.progress, size * run.sizes.seq * run.rows
    run.progress = replace(
        progress,
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + size,
        scheduled_samples=progress.scheduled_samples + (0 if report.skipped else size),
        flops=progress.flops + tokens * run.meter.flops,
        engine=run.engine.state(),
    )
    run.empty += report.empty
    run.skipped += report.skipped and not report.empty
    run.meter.add(size, tokens)
    if not report.empty:
        run.losses.append((run.progress.iteration, report.loss))
    if not report.skipped:
        run.interval.append(report)


def _log(run: Run, report: StepReport, rates: Rates, *, last: bool) -> None:
    """Each --log-interval steps; the last one always, so that a short run says something."""
    due = last or run.progress.iteration % run.settings.logging.log_interval == 0
    if run.place.rank or not due:
        return
    steps = run.interval or [report]
    figures: dict[str, Any] = {
        "iteration": run.progress.iteration,
        "consumed_samples": run.progress.consumed_samples,
        "loss": mean(each.loss for each in steps),
        "grad_norm": report.grad_norm,
        "learning_rate": rates.lr,
        "memory_bytes": memory_bytes(run.engine.grid.device),
        "loss_scale": report.loss_scale,
        "skipped": run.skipped,
        "empty": run.empty,
        "device": "GPU" if run.engine.grid.device.type == "cuda" else "process",
        **run.meter.read(run.progress.consumed_samples),
    }
    others = {name: mean(each.others[name] for each in steps) for name in report.others}
    if report.largest_score is not None:
        others["max_attention_logit"] = max(each.largest_score or 0.0 for each in steps)
    run.interval.clear()
    run.say(line(figures | {"others": others}, run.settings.training.train_iters))
    for sink in run.sinks:
        sink.write(run.progress.iteration, {**{name: figures[name] for name in METRICS}, **others})


def memory_bytes(device: torch.device) -> int:
    """The most that this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reason_to_end(run: Run, report: StepReport) -> str | None:
    interval = run.settings.training.exit_interval
    if report.signals[0]:
        return "SIGTERM"
    if report.signals[1]:
        return f"--exit-duration-in-mins {run.settings.training.exit_duration_in_mins:g}"
    if interval is not None and run.progress.iteration % interval == 0:
        return f"--exit-interval {interval}"
    return None


def _evaluate_when_due(run: Run, garbage: Garbage) -> None:
    if run.progress.iteration % run.settings.training.eval_interval == 0:
        with garbage.evaluation():
            evaluate(run, run.datasets[1], "validation")


def evaluate(run: Run, dataset: Dataset | None, what: str) -> None:
    """The means of all losses over the next --eval-iters batches."""
    iters, size = run.settings.training.eval_iters, run.sizes.batch.full
    if dataset is None or not iters:
        return
    first = run.progress.consumed_valid_samples if what == "validation" else 0
    totals = _totals(run, dataset, first, iters)
    step = run.progress.iteration
    if what == "validation":
        run.progress = replace(run.progress, consumed_valid_samples=first + iters * size)
    means = {name: total / count for name, (total, count) in totals.items() if count}
    if "loss" not in means:
        run.say(f"step {step:>6} | {what}: no label counts, so there is no loss")
        return
    loss = means.pop("loss")
    if what == "validation":
        run.evaluations.append((step, loss))
    perplexity = "" if run.settings.dpo.dpo or run.exam is not None else f" | perplexity {math.exp(min(loss, 700)):.3f}"
    run.say(f"step {step:>6} | {what} loss {loss:.5f}{perplexity}{further(means)}")
    for sink in run.sinks if run.place.rank == 0 else ():
        others = {f"{what}_{name}": value for name, value in means.items()}
        sink.write(step, {"iteration": step, f"{what}_loss": loss, **others})
    run.meter.restart()


def _totals(run: Run, dataset: Dataset, first: int, batches: int) -> dict[str, list[float]]:
    """Of each loss (its sum, how many count) over so many batches from sample `first` on."""
    size, totals = run.sizes.batch.full, dict[str, list[float]]()
    for _, batch in prefetch(run.batches(dataset), ((first + number * size, size) for number in range(batches))):
        for name, (total, count) in run.engine.evaluate(run.feeder.microbatches(batch)).items():
            sums = totals.setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + total, sums[1] + count
    return totals


def _end_epoch_when_due(run: Run, garbage: Garbage) -> None:
    """As Megatron's tasks: what has been learned is measured and saved."""
    if run.exam is not None and run.progress.consumed_samples % run.exam.epoch_samples == 0:
        with garbage.evaluation():
            examine(run, run.exam)
        save(run)


def examine(run: Run, exam: Exam) -> None:
    """How many examples of each file of --valid-data are answered right, and of all together; each counts once at every layout."""
    step, size = run.progress.iteration, run.sizes.batch.full
    epoch = run.progress.consumed_samples // exam.epoch_samples if exam.epoch_samples else 0
    found = {
        path: _totals(run, dataset, 0, len(dataset) // size)["accuracy"] for path, dataset in exam.datasets.items()
    }
    if len(found) > 1:
        found["all of them"] = [sum(column) for column in zip(*found.values(), strict=True)]
    for path, (right, count) in found.items():
        run.say(
            f"step {step:>6} | epoch {epoch} | {path}: {right:,.0f} of {count:,.0f} right | accuracy {right / count:.4%}"
        )
    for sink in run.sinks if found and run.place.rank == 0 else ():
        sink.write(
            step,
            {"iteration": step, "epoch": epoch}
            | {f"accuracy {path}": right / count for path, (right, count) in found.items()},
        )
    run.examined = step
    run.meter.restart()


def _save_when_due(run: Run) -> None:
    interval = run.settings.checkpointing.save_interval
    if interval is not None and run.progress.iteration % interval == 0:
        save(run)


def save(run: Run) -> None:
    """Unless this iteration is saved already."""
    if run.saver is None or run.saved == run.progress.iteration:
        return
    begun = time.perf_counter()
    saving, progress = run.settings.checkpointing, run.progress
    if run.engine.options.lora is not None:
        where = (
            f"{saving.save}/{rank_files.iteration_directory(progress.iteration)}"  # what peft and megaconv merge take
        )
        taken = adapter_snapshot(run.engine, progress, str(saving.load), with_optimizer=not saving.no_save_optim)
    else:
        where, taken = str(saving.save), _snapshot(run)
    run.saver.save(taken)
    run.saved = progress.iteration
    ways = " (being written while training goes on)" if saving.async_save else ""
    run.say(f"step {progress.iteration:>6} | saved to {where} in {time.perf_counter() - begun:.2f} s{ways}")
    run.meter.restart()


def _snapshot(run: Run) -> Snapshot:
    """Of all weights."""
    saving, progress = run.settings.checkpointing, run.progress
    samples = run.scheduled
    with_optimizer = not saving.no_save_optim
    largest = amax.histories(run.engine)
    if largest and progress.engine is not None:
        progress = replace(progress, engine={**progress.engine, amax.AMAX: largest})
    common = common_state(
        run.settings, run.config, run.sizes, run.dropouts, progress, run.schedule.state(samples), run.schedule.at(samples),
        with_optimizer=with_optimizer,
    )  # fmt: skip
    take = dist_snapshot if saving.ckpt_format == "torch_dist" else rank_snapshot
    return take(run.engine, common, with_optimizer=with_optimizer, impl=saving.transformer_impl)


def _finish(run: Run, why: str | None) -> None:
    save(run)
    if run.saver is not None:
        run.saver.finish()
    if why is None and run.exam is not None and run.examined != run.progress.iteration:
        examine(run, run.exam)
    if why is None:
        evaluate(run, run.datasets[2], "test")
    else:
        run.say(f"step {run.progress.iteration:>6} | ending as asked by {why}")
    run.engine.finish()
    if run.settings.logging.plot and run.place.rank == 0 and run.losses:
        plot.draw(Path(run.settings.logging.plot), run.losses, run.evaluations)
    for sink in run.sinks:
        sink.close()
