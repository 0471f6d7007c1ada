"""The checks of the flags that belong to a training objective. They need no torch, because `plan` works without it."""

import os

from megaconv.errors import UsageError
from megatron_lite.settings.completion_flags import OF_COMPLETIONS, judge_numbers, judge_prompts
from megatron_lite.settings.config import Checkpointing, Settings
from megatron_lite.settings.contradictions import Judged, flag_name
from megatron_lite.settings.learning import WITH_REFERENCE

OTHER_DATA = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "split", "mock_data", "finetune_data", "valid_finetune_data",
    "mask_prob", "short_seq_prob", "rampup_batch_size", "step_batch_size_schedule",
)  # fmt: skip
"""Settings that a run on a task does not use."""


def check_objective_flags(settings: Settings) -> None:
    """Raise UsageError for the first flag of an objective that is wrong, or that the run's objective does not use."""
    for judge in (
        _finetune_loss,
        _pairs,
        _ratings,
        _rewards,
        _embedding,
        _policy,
        _distillation,
        _task,
        _of_package,
        _images,
    ):
        for wrong, message in judge(settings):
            if wrong:
                raise UsageError(message)


def _finetune_loss(settings: Settings) -> Judged:
    """Checks of the loss of examples."""
    if "finetune_loss" not in settings.given:
        return
    yield (
        not settings.data.finetune_data,
        "--finetune-loss is the loss of --finetune-data, which is missing",
    )
    others = [*_objectives(settings), ("--teacher-load", bool(settings.distilling.teacher_load))]
    for other, is_asked in others:
        yield is_asked, f"--finetune-loss: {other} has a loss of its own; leave one of them out"


def _pairs(settings: Settings) -> Judged:
    """Checks of training on pairs."""
    dpo, saving = settings.dpo, settings.checkpointing
    if not dpo.dpo:
        for name in vars(dpo):
            yield name in settings.given, f"{flag_name(name)} requires --dpo"
        return
    smoothing = dpo.dpo_label_smoothing
    has_reference = dpo.dpo_loss in WITH_REFERENCE
    yield not settings.data.finetune_data, "--dpo learns from --finetune-data, which is missing"
    yield (
        has_reference and saving.load is None,
        "--dpo needs --load, which is the reference model, also with --resume",
    )
    yield (
        has_reference and _saves_over_load(saving),
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
        dpo.dpo_reference_cache is not None and not has_reference,
        f"--dpo-loss {dpo.dpo_loss} has no reference model; leave --dpo-reference-cache out",
    )
    yield (
        "simpo_gamma" in settings.given and dpo.dpo_loss != "simpo",
        "--simpo-gamma requires --dpo-loss simpo",
    )
    yield (
        not 0 <= dpo.simpo_gamma < float("inf"),
        f"--simpo-gamma {dpo.simpo_gamma:g} must be 0 or more",
    )
    yield (
        settings.data.finetune_form is not None,
        "--finetune-form names a form of examples; pairs have their own, so leave it out",
    )


def _ratings(settings: Settings) -> Judged:
    """Checks of training on rated answers."""
    kto, saving = settings.kto, settings.checkpointing
    if not kto.kto:
        for name in vars(kto):
            yield name in settings.given, f"{flag_name(name)} requires --kto"
        return
    yield from _alone("--kto", settings)
    yield not settings.data.finetune_data, "--kto learns from --finetune-data, which is missing"
    yield (
        saving.load is None,
        "--kto needs --load, which is the reference model, also with --resume",
    )
    yield (
        _saves_over_load(saving),
        "--kto: --load is the reference model and has to stay as it is; give another --save",
    )
    yield (
        not 0 < kto.kto_beta < float("inf"),
        f"--kto-beta {kto.kto_beta:g} must be more than 0 and finite",
    )
    for name in ("kto_desirable_weight", "kto_undesirable_weight"):
        value = getattr(kto, name)
        yield (
            not 0 <= value < float("inf"),
            f"{flag_name(name)} {value:g} must be 0 or more, and finite",
        )
    yield (
        not kto.kto_desirable_weight and not kto.kto_undesirable_weight,
        "--kto-desirable-weight and --kto-undesirable-weight are both 0, so that nothing is learned; give one of them a value",
    )
    yield (
        settings.data.finetune_form is not None,
        "--finetune-form names a form of examples; rated answers have their own, so leave it out",
    )


def _embedding(settings: Settings) -> Judged:
    """Checks of embedding models."""
    asked, flag = settings.embeddings, "--embedding"
    if not asked.embedding:
        for name in vars(asked):
            yield name in settings.given, f"{flag_name(name)} requires {flag}"
        return
    yield from _alone(flag, settings)
    yield (
        not settings.data.finetune_data,
        f"{flag} learns from queries of --finetune-data, which is missing",
    )
    yield (
        settings.checkpointing.load is None,
        f"{flag} needs --load: a language model or an embedding model to start from",
    )
    yield (
        settings.distilling.teacher_load is not None,
        f"{flag} learns from queries, and --teacher-load from predictions of words; leave one of them out",
    )
    yield (
        settings.parallel.context_parallel_size > 1,
        f"{flag} compares whole texts, which --context-parallel-size would divide; leave it out",
    )
    yield (
        not 0 < asked.embedding_temperature < float("inf"),
        f"--embedding-temperature {asked.embedding_temperature:g} must be more than 0 and finite",
    )
    yield (
        asked.embedding_negatives < 0,
        f"--embedding-negatives {asked.embedding_negatives} must be 0 or more",
    )
    for name in ("finetune_form", "chat_template", "finetune_turns"):
        yield (
            name in settings.given,
            f"{flag_name(name)} is for examples, and {flag} reads queries; leave it out",
        )


def _alone(flag: str, settings: Settings) -> Judged:
    """Checks that no other objective is selected. flag: selects this one."""
    for other, asked in _objectives(settings):
        yield (
            asked and other != flag,
            f"{flag} and {other} are two objectives; leave one of them out",
        )


def _rewards(settings: Settings) -> Judged:
    """Checks of reward modeling."""
    rewards, coefficient = settings.rewards, settings.rewards.center_rewards_coefficient
    if not rewards.reward_modeling:
        for name in vars(rewards):
            yield name in settings.given, f"{flag_name(name)} requires --reward-modeling"
        return
    for other, asked in (("--dpo", settings.dpo.dpo), ("--grpo", settings.grpo.grpo)):
        yield (
            asked,
            f"--reward-modeling and {other} are two objectives; leave one of them out",
        )
    yield (
        not settings.data.finetune_data,
        "--reward-modeling learns from pairs of --finetune-data, which is missing",
    )
    yield (
        settings.checkpointing.load is None,
        "--reward-modeling needs --load: a language model or a reward model to start from",
    )
    yield (
        not 0 <= coefficient < float("inf"),
        f"--center-rewards-coefficient {coefficient:g} must be 0 or more",
    )
    yield (
        settings.data.finetune_form is not None,
        "--finetune-form names a form of examples; pairs have their own, so leave it out",
    )


def _saves_over_load(saving: Checkpointing) -> bool:
    """Return whether --save is the directory of --load."""
    if not (saving.load and saving.save):
        return False
    return os.path.realpath(saving.load) == os.path.realpath(saving.save)


def _saves_over(place: str, saving: Checkpointing) -> bool:
    """Return whether a place is the directory of --save, or inside it."""
    if not saving.save:
        return False
    root, own = os.path.realpath(saving.save), os.path.realpath(place)
    return own == root or own.startswith(root + os.sep)


def _policy(settings: Settings) -> Judged:
    """Checks of GRPO."""
    grpo, saving = settings.grpo, settings.checkpointing
    if not grpo.grpo:
        yield (
            settings.dpo.dpo and "beta" in settings.given,
            "--beta is a flag of --grpo; with --dpo, give --dpo-beta",
        )
        on_policy = settings.distilling.distill_on_policy
        for name in vars(grpo):
            of_both = name in OF_COMPLETIONS
            needed = "--grpo or --distill-on-policy" if of_both else "--grpo"
            wrong = name in settings.given and not (of_both and on_policy)
            yield wrong, f"{flag_name(name)} requires {needed}"
        return
    yield settings.dpo.dpo, "--grpo and --dpo are two objectives; leave one of them out"
    yield (
        not settings.data.finetune_data,
        "--grpo completes prompts of --finetune-data, which is missing",
    )
    yield not grpo.reward, "--grpo needs --reward FILE.py:FUNCTION, which judges completions"
    rewards, weights = grpo.reward or (), grpo.reward_weights or ()
    yield (
        grpo.reward_weights is not None and len(weights) != len(rewards),
        f"--reward-weights has {len(weights)} numbers, --reward {len(rewards)} functions; give one number for each",
    )
    yield from judge_numbers(grpo)
    yield (
        grpo.beta and saving.load is None,
        "--beta needs --load, which is the reference model, also with --resume",
    )
    yield (
        grpo.beta and _saves_over_load(saving),
        "--beta: --load is the reference model and has to stay as it is; give another --save",
    )
    yield from judge_prompts(settings, "--grpo")


def _distillation(settings: Settings) -> Judged:
    """Checks of learning from a teacher."""
    asked = settings.distilling
    if asked.teacher_load is None:
        for name in vars(asked):
            yield name in settings.given, f"{flag_name(name)} requires --teacher-load"
        return
    for other, is_asked in _objectives(settings):
        yield (
            is_asked,
            f"--teacher-load and {other} are two objectives; leave one of them out",
        )
    for name in ("distill_alpha", "distill_beta"):
        value = getattr(asked, name)
        yield not 0 <= value <= 1, f"{flag_name(name)} {value:g} has to lie between 0 and 1"
    yield (
        not 0 < asked.distill_temperature < float("inf"),
        f"--distill-temperature {asked.distill_temperature:g} must be more than 0 and finite",
    )
    yield (
        _saves_over(asked.teacher_load, settings.checkpointing),
        f"--teacher-load {asked.teacher_load}: is in the directory of --save, and the teacher has to stay as it is; give another --save",
    )
    if asked.distill_on_policy:
        yield (
            not settings.data.finetune_data,
            "--distill-on-policy completes prompts of --finetune-data, which is missing",
        )
        yield from judge_prompts(settings, "--distill-on-policy")


def _objectives(settings: Settings) -> list[tuple[str, bool]]:
    """Return the flags of objectives, and whether they are given."""
    return [
        ("--dpo", settings.dpo.dpo),
        ("--kto", settings.kto.kto),
        ("--reward-modeling", settings.rewards.reward_modeling),
        ("--embedding", settings.embeddings.embedding),
        ("--grpo", settings.grpo.grpo),
        ("--task", settings.tasks.task is not None),
    ]


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
    asked_teacher = settings.distilling.teacher_load is not None
    for flag, asked in (*_objectives(settings), ("--teacher-load", asked_teacher)):
        yield (
            asked,
            f"--objective {name} and {flag} are two objectives; leave one of them out",
        )


def _images(settings: Settings) -> Judged:
    """Checks of training on images."""
    yield (
        settings.tasks.task is not None and settings.data.image_encoder is not None,
        "--image-encoder is for images of chats, answers and prompts, and --task learns from something else; leave one of them out",
    )
