"""The checks of the flags that belong to a training objective. They need no torch, because `plan` works without it."""

import os

from megaconv.errors import UsageError
from megatron_lite.settings.config import Settings
from megatron_lite.settings.contradictions import Judged, flag_name

OTHER_DATA = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "mock_data", "finetune_data", "valid_finetune_data",
    "mask_prob", "short_seq_prob", "rampup_batch_size",
)  # fmt: skip
"""Settings that a run on a task does not use."""


def check_objective_flags(settings: Settings) -> None:
    """Raise UsageError for the first flag of an objective that is wrong, or that the run's objective does not use."""
    for judge in (_pairs, _task, _of_package):
        for wrong, message in judge(settings):
            if wrong:
                raise UsageError(message)


def _pairs(settings: Settings) -> Judged:
    """Checks of training on pairs."""
    dpo, saving = settings.dpo, settings.checkpointing
    if not dpo.dpo:
        for name in vars(dpo):
            yield name in settings.given, f"{flag_name(name)} requires --dpo"
        return
    same = (
        saving.load
        and saving.save
        and os.path.realpath(saving.load) == os.path.realpath(saving.save)
    )
    smoothing = dpo.dpo_label_smoothing
    yield not settings.data.finetune_data, "--dpo learns from --finetune-data, which is missing"
    yield (
        saving.load is None,
        "--dpo needs --load, which is the reference model, also with --resume",
    )
    yield (
        same,
        "--dpo: --load is the reference model and has to stay as it is; give another --save",
    )
    yield dpo.dpo_beta <= 0, f"--dpo-beta {dpo.dpo_beta:g} must be more than 0"
    yield (
        not 0 <= smoothing < 0.5,
        f"--dpo-label-smoothing {smoothing:g} has to lie between 0 and 0.5",
    )
    yield (
        smoothing and dpo.dpo_loss != "sigmoid",
        "--dpo-label-smoothing requires --dpo-loss sigmoid",
    )
    yield (
        settings.data.finetune_form is not None,
        "--finetune-form names a form of examples; pairs have their own, so leave it out",
    )


def _task(settings: Settings) -> Judged:
    """Checks of tasks of Megatron-LM."""
    tasks, epochs = settings.tasks, settings.training.epochs
    if tasks.task is None:
        for name in vars(tasks):
            other = (
                "; --data-path takes indexed data and names of --corpora"
                if name == "train_data"
                else ""
            )
            yield name in settings.given, f"{flag_name(name)} requires --task{other}"
        return
    for name in OTHER_DATA:
        yield (
            name in settings.given,
            f"--task {tasks.task} learns from --train-data; leave {flag_name(name)} out",
        )
    yield (
        epochs is None or epochs < 0,
        f"--task {tasks.task} needs --epochs: how often it goes through --train-data; 0 measures alone",
    )
    yield (
        epochs and not tasks.train_data,
        f"--task {tasks.task} learns from --train-data, which is missing",
    )
    yield (
        "eval_iters" in settings.given and settings.training.eval_iters and not tasks.valid_data,
        "--eval-iters: evaluations are of --valid-data, which is missing; leave it out",
    )
    yield (
        epochs == 0 and not tasks.valid_data,
        f"--task {tasks.task} --epochs 0 measures on --valid-data, which is missing",
    )


def _of_package(settings: Settings) -> Judged:
    """Checks of an objective of another package."""
    name = settings.objective.objective
    if name is None:
        return
    for flag, asked in (("--dpo", settings.dpo.dpo), ("--task", settings.tasks.task)):
        yield (
            bool(asked),
            f"--objective {name} and {flag} are two objectives; leave one of them out",
        )
