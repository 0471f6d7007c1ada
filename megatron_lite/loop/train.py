"""The training loop: data, step, log, evaluation, save, and all reasons for a run to end."""

import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch

from formats.stores.addresses import is_store
from formats.wording import counted
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.batches import prefetch
from megatron_lite.data.samples import Dataset
from megatron_lite.loop import plot
from megatron_lite.loop.best import compares, note_evaluation, patience_is_over, say_best
from megatron_lite.loop.garbage import Garbage
from megatron_lite.loop.guide import Guide
from megatron_lite.loop.length import remaining_steps
from megatron_lite.loop.log import METRICS, line
from megatron_lite.loop.profiling import Profile, make_profile
from megatron_lite.loop.run import Run
from megatron_lite.loop.saving import check_space, save
from megatron_lite.loop.schedule import Rates
from megatron_lite.objectives.training_data import Exam
from megatron_lite.processes.failure import TrainingError
from megatron_lite.rank.report import StepReport


def train(run: Run) -> None:
    """Train until the end or until a request to stop, then save. Raises TrainingError if the loss is not a number."""
    garbage = Garbage(run.settings.training)
    save = run.settings.checkpointing.save
    directory = None if save is None or is_store(save) else save
    profile = make_profile(run.settings.logging, directory, run.place.rank, run.place.device)
    garbage.start()
    guide = Guide(run)
    guide.start()
    run.meter.restart()
    why = _all_steps(run, garbage, profile)
    profile.end()
    garbage.end()
    _finish(run, why)
    guide.end()


def _all_steps(run: Run, garbage: Garbage, profile: Profile) -> str | None:
    """Make the remaining steps. Return the reason to end before the last one, or None."""
    train_data = run.datasets[0]
    assert train_data is not None
    heartbeat = run.place.heartbeat
    started = time.monotonic()
    steps = list(remaining_steps(run.settings, run.sizes, run.progress))
    why = patience_is_over(run)
    if why is not None:
        return why
    if steps:
        check_space(run)
    elif run.settings.training.epochs != 0:
        progress = run.progress
        run.say(
            f"nothing left: the run has made its {counted(progress.iteration, 'step')}, {counted(progress.consumed_samples, 'sample')}"
        )
    for consumed, batch in prefetch(run.batches(train_data), iter(steps)):
        rates = run.schedule.at(run.scheduled)
        profile.after(run.progress.iteration)
        signals = (run.stop.terminated, run.stop.interrupted, _time_is_up(run, started))
        for microbatches in run.feeder.updates(consumed, batch):
            report = run.engine.train_step(
                microbatches, rates.lr, rates.weight_decay, signals, rates.decoupled_lr
            )
            _check(run, report)
            _count(run, report)
        _advance(run, report, run.sizes.batch.at(consumed))
        iteration = run.progress.iteration
        if heartbeat is not None:
            heartbeat.step(iteration)
        garbage.after(iteration)
        _check_replicas(run)
        _log(run, report, rates, last=consumed == steps[-1][0])
        if run.saver is not None:
            run.saver.check()
        why = _reason_to_hurry(run, report)
        if why is not None:
            _skip_evaluation_when_due(run)
            return why
        _evaluate_when_due(run, garbage)
        _end_epoch_when_due(run, garbage)
        why = patience_is_over(run)
        if why is not None:
            return why
        interval = run.settings.training.exit_interval
        if interval is not None and iteration % interval == 0:
            return f"--exit-interval {interval}"
        _save_when_due(run)
    return None


def _time_is_up(run: Run, started: float) -> bool:
    """Return whether the time of --exit-duration-in-mins is over. Rank 0 decides."""
    limit = run.settings.training.exit_duration_in_mins
    return run.place.rank == 0 and limit is not None and time.monotonic() - started > limit * 60


def _check(run: Run, report: StepReport) -> None:
    """Raise TrainingError if the loss or the gradients of an update are not finite."""
    if run.settings.training.no_check_for_nan_in_loss_and_grad:
        return
    # With fp16, a skipped step only means that the loss scale was too large.
    if report.skipped and run.settings.precision.fp16:
        return
    step = run.progress.iteration + 1
    what = None
    if not math.isfinite(report.loss):
        what = f"the loss is {report.loss}"
    elif report.skipped and not report.empty:
        what = f"the norm of the gradients is {report.grad_norm}"
    if what is not None:
        raise TrainingError(
            f"step {step}: {what}; lower --lr or look at the data of samples {run.progress.consumed_samples} and after "
            "(--no-check-for-nan-in-loss-and-grad continues regardless)"
        )


def _check_replicas(run: Run) -> None:
    """Raise TrainingError on the ranks that hold a parameter which differs between replicas."""
    interval = run.settings.training.check_weight_hash_across_dp_replicas_interval
    if interval is None or run.progress.iteration % interval:
        return
    found = run.engine.differing()
    if found:
        first, ranks = found[0], ", ".join(map(str, found[0].ranks))
        more = f" and {counted(len(found) - 1, 'more parameter')}" if len(found) > 1 else ""
        raise TrainingError(
            f"step {run.progress.iteration}: {first.name}{more} of data-parallel ranks {ranks} differs from rank 0: "
            "a device or a link computed a wrong value; continue from the last checkpoint on other machines"
        )


def _count(run: Run, report: StepReport) -> None:
    """Count an update. A step may make several."""
    was_skipped = report.skipped and not report.empty
    run.empty += report.empty
    run.skipped += was_skipped
    if not was_skipped:
        # A step without labels has no loss, and may have figures: the rewards of completions that are all masked.
        run.interval.append(report)


def _advance(run: Run, report: StepReport, size: int) -> None:
    progress = run.progress
    tokens = size * run.sizes.seq * run.objective.rows
    scheduled = 0 if report.skipped else size
    run.progress = replace(
        progress,
        iteration=progress.iteration + 1,
        consumed_samples=progress.consumed_samples + size,
        scheduled_samples=progress.scheduled_samples + scheduled,
        flops=progress.flops + tokens * run.meter.flops,
        engine=run.engine.state(),
    )
    run.meter.add(size, tokens)
    if not report.empty:
        point = run.progress.iteration, report.loss
        run.losses.append(point)


def _log(run: Run, report: StepReport, rates: Rates, *, last: bool) -> None:
    """Print a log line every --log-interval steps, and after the last step, so that a short run prints one."""
    due = last or run.progress.iteration % run.settings.logging.log_interval == 0
    if not due:
        return
    steps = run.interval or [report]
    run.interval = []  # also on ranks that print nothing
    if run.place.rank:
        return
    figures: dict[str, Any] = {
        "iteration": run.progress.iteration,
        "consumed_samples": run.progress.consumed_samples,
        "loss": _mean_loss(steps),
        "grad_norm": report.grad_norm,
        "learning_rate": rates.lr,
        "memory_bytes": memory_bytes(run.engine.grid.device),
        "loss_scale": report.loss_scale,
        "skipped": run.skipped,
        "empty": run.empty,
        "device": "GPU" if run.engine.grid.device.type == "cuda" else "process",
        **run.meter.read(run.progress.consumed_samples),
    }
    others = _means_of_others(steps)
    if report.largest_score is not None:
        others["max_attention_logit"] = max(each.largest_score or 0.0 for each in steps)
    run.say(line(figures, run.objective.shown(others), run.settings.training.train_iters))
    for sink in run.sinks:
        sink.write(run.progress.iteration, {**{name: figures[name] for name in METRICS}, **others})


def _mean_loss(steps: Sequence[StepReport]) -> float:
    """Return the mean loss of the steps with labels; of all steps if there are none."""
    learned = [each for each in steps if not each.empty]
    return mean(each.loss for each in learned or steps)


def _means_of_others(steps: Sequence[StepReport]) -> dict[str, float]:
    """Return the mean of each figure over the steps that have it."""
    names = dict.fromkeys(name for each in steps for name in each.others)
    return {
        name: mean(each.others[name] for each in steps if name in each.others) for name in names
    }


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reason_to_hurry(run: Run, report: StepReport) -> str | None:
    """Return the reason to save and end at once, or None."""
    terminated, interrupted, time_is_up = report.signals
    if terminated:
        return "SIGTERM"
    if interrupted:
        return "Ctrl-C"
    if time_is_up:
        return f"--exit-duration-in-mins {run.settings.training.exit_duration_in_mins:g}"
    return None


def _evaluation_is_due(run: Run) -> bool:
    is_due = run.progress.iteration % run.settings.training.eval_interval == 0
    return is_due and run.datasets[1] is not None and run.settings.training.eval_iters > 0


def _skip_evaluation_when_due(run: Run) -> None:
    """Go on behind the samples of an evaluation that is left out, so that later evaluations keep their samples."""
    if _evaluation_is_due(run):
        run.progress = _behind_evaluation(run)
        run.say(f"step {run.progress.iteration:>6} | validation left out, as the run has to end")


def _behind_evaluation(run: Run) -> Progress:
    drawn = run.settings.training.eval_iters * run.sizes.batch.full
    return replace(run.progress, consumed_valid_samples=run.progress.consumed_valid_samples + drawn)


def _evaluate_when_due(run: Run, garbage: Garbage) -> None:
    if _evaluation_is_due(run):
        with garbage.evaluation():
            evaluate(run, run.datasets[1], "validation")
        is_best = run.progress.best_iteration == run.progress.iteration
        if run.settings.checkpointing.keep_best and is_best:
            save(run)


def evaluate(run: Run, dataset: Dataset | None, what: str) -> None:
    """Print the means of all losses over --eval-iters batches, and write them to the sinks.

    dataset: None evaluates nothing. what: `validation`, which goes on where the last one ended, or `test`.
    """
    iters = run.settings.training.eval_iters
    if dataset is None or not iters:
        return
    is_validation = what == "validation"
    # Evaluations that are compared with each other read the same samples.
    goes_on = is_validation and not compares(run.settings)
    first = run.progress.consumed_valid_samples if goes_on else 0
    totals = _totals(run, dataset, first, iters)
    step = run.progress.iteration
    if is_validation:
        run.progress = _behind_evaluation(run)
    means = {name: total / count for name, (total, count) in totals.items() if count}
    figures = {f"{what}_{name}": value for name, value in means.items()}
    loss = means.pop("loss", None)
    others = run.objective.shown(means) if means else ""
    if loss is not None and is_validation:
        run.evaluations.append((step, loss))
        note_evaluation(run, loss)
    run.say(f"step {step:>6} | {what}{_shown_loss(run, loss)}{others}")
    _write(run, figures)
    run.meter.restart()


def _shown_loss(run: Run, loss: float | None) -> str:
    """Return the words of a log line about the loss of an evaluation. loss: None if no label counts."""
    if loss is None:
        return ": no label counts, so there is no loss"
    perplexity = ""
    if run.objective.perplexity:
        perplexity = f" | perplexity {math.exp(min(loss, 700)):.3f}"
    return f" loss {loss:.5f}{perplexity}"


def _write(run: Run, figures: Mapping[str, float]) -> None:
    """Write figures of an evaluation or an exam to the sinks."""
    step = run.progress.iteration
    for sink in run.sinks if run.place.rank == 0 else ():
        sink.write(step, {"iteration": step, **figures})


def _totals(run: Run, dataset: Dataset, first: int, batches: int) -> dict[str, list[float]]:
    """Return [sum, number of labels that count] of each loss over the batches that begin at sample `first`."""
    size = run.sizes.batch.full
    steps = ((first + number * size, size) for number in range(batches))
    totals: dict[str, list[float]] = {}
    for consumed, batch in prefetch(run.batches(dataset), steps):
        microbatches = next(run.feeder.updates(consumed, batch))
        for name, (total, count) in run.engine.evaluate(microbatches).items():
            sums = totals.setdefault(name, [0.0, 0.0])
            sums[0] += total
            sums[1] += count
    return totals


def _end_epoch_when_due(run: Run, garbage: Garbage) -> None:
    """At the end of an epoch, measure and save, as Megatron's tasks do."""
    if run.exam is not None and run.progress.consumed_samples % run.exam.epoch_samples == 0:
        with garbage.evaluation():
            examine(run, run.exam)
        save(run)


def examine(run: Run, exam: Exam) -> None:
    """Report the number of right answers for each file of --valid-data, and for all together.

    Each example counts once in every layout.
    """
    step, size = run.progress.iteration, run.sizes.batch.full
    epoch = run.progress.consumed_samples // exam.epoch_samples if exam.epoch_samples else 0
    found: dict[str, list[float]] = {}
    for path, dataset in exam.datasets.items():
        found[path] = _totals(run, dataset, 0, len(dataset) // size)["accuracy"]
    if len(found) > 1:
        found["all of them"] = [sum(column) for column in zip(*found.values(), strict=True)]
    accuracies = {}
    for path, (right, count) in found.items():
        accuracy = right / count
        accuracies[f"accuracy {path}"] = accuracy
        answers = f"{right:,.0f} of {count:,.0f} right"
        run.say(f"step {step:>6} | epoch {epoch} | {path}: {answers} | accuracy {accuracy:.4%}")
    if found:
        _write(run, {"epoch": epoch, **accuracies})
    run.examined = step
    run.meter.restart()


def _save_when_due(run: Run) -> None:
    interval = run.settings.checkpointing.save_interval
    if interval is not None and run.progress.iteration % interval == 0:
        save(run)


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
    say_best(run)
    run.engine.finish()
    if run.settings.logging.plot and run.place.rank == 0 and run.losses:
        plot.draw(Path(run.settings.logging.plot), run.losses, run.evaluations)
    for sink in run.sinks:
        sink.close()
