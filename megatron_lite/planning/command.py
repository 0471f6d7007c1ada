"""`megatron-lite plan`: predicts the needs of a run without starting it."""

import sys
from dataclasses import replace
from itertools import takewhile
from math import prod
from pathlib import Path

from megaconv.errors import CheckpointError, NotExpressible, UsageError
from megaconv.families import has_text_only, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.json_text import json_text
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.planning.gpus import DEFAULT_GPU, gpu_named
from megaconv.terminal import show
from megatron_lite.models.lora.targets import check_targets
from megatron_lite.models.lora.whole import beside_layers
from megatron_lite.models.purposes import (
    check_teacher,
    refuse_scores,
    refuse_taught,
    refuse_whole,
)
from megatron_lite.models.trainable import check_computed
from megatron_lite.objectives.image_models import (
    TEACHER_FLAG,
    multimodal_directory,
    multimodal_model,
)
from megatron_lite.objectives.scored_model import scored
from megatron_lite.planning.encoders import Encoder, encoder_of
from megatron_lite.planning.report import Planned
from megatron_lite.planning.stages import Described
from megatron_lite.planning.work import work_of
from megatron_lite.settings.architecture import check_against, model_from_flags, model_type
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import Settings
from megatron_lite.settings.contradictions import check_flags
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.kinds import check_kind
from megatron_lite.settings.objective_flags import check_objective_flags
from megatron_lite.settings.options import LoRA
from megatron_lite.settings.run_options import adapter_options, model_options, optimizer_options
from megatron_lite.settings.short_form import SHARDINGS
from megatron_lite.settings.sizes import Sizes, work_out
from megatron_lite.settings.teacher import require_tokens

DESCRIPTION = """\
Memory of each rank, bytes between ranks, the pipeline's bubble and the estimated time of a step, without starting it or reading a weight.

--world-size N       ranks of the run (as few as tp x cp x pp)
--gpu NAME           GPU for the estimated time of a step, such as h800 or a100; h100 by default
--json               for programs
--load PATH          a config.json, or any checkpoint that megaconv reads; without it flags describe the model

All other flags are those of `megatron-lite pretrain` and `finetune`, which see; bf16 where no precision is given.
MODEL DATA may come first, as in `finetune MODEL DATA`, or MODEL alone. --lora-rank, --dpo, --kto, --reward-modeling and --grpo
are planned too. Data and rewards are not read, so give --seq-length and --global-batch-size.
--grpo: --seq-length counts the longest prompt with --max-completion-length.

example:
  megatron-lite plan --load Llama-3.1-405B --world-size 8192 --tp 8 --pp 16 --num-virtual-stages-per-pipeline-rank 8 \\
      --sequence-parallel --use-distributed-optimizer --seq-length 8192 --global-batch-size 2048
  megatron-lite plan Llama-3.1-8B --world-size 8 --lora-rank 16 --dpo --seq-length 2048 --global-batch-size 64
"""
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
"""Dropout is left out: it adds only a mask to memory, and this trainer generates the mask again."""


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    if {"-h", "--help"} & set(words):
        print(DESCRIPTION, end="")
        return 0
    try:
        own, rest = _own_parser().parse_known_args(words)
        planned = Planned(describe(own.world_size, rest), gpu_named(own.gpu))
        text = json_text(planned.to_json(), indent=2) if own.json else None
        lines = list(planned.lines()) if text is None else []
    except CheckpointError as error:
        show(f"megatron-lite: error: {error}", sys.stderr)
        return error.exit_status
    if text is not None:
        print(text)
    for line in lines:
        show(line)
    return 0


def _own_parser() -> FlagParser:
    parser = FlagParser(prog="megatron-lite plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--gpu", default=DEFAULT_GPU)
    parser.add_argument("--json", action="store_true")
    return parser


def describe(world: int | None, words: list[str]) -> Described:
    """Return the run that flags of pretrain describe. Raises CheckpointError for flags that pretrain refuses too."""
    if world is not None and world < 1:
        raise UsageError(f"--world-size {world} must be 1 or more")
    settings = _settings(world, words)
    training, precision = settings.training, settings.precision
    if not (training.train_iters or training.train_samples or training.epochs):
        settings = replace(settings, training=replace(training, train_iters=1))
    if not precision.chosen:
        settings = replace(settings, precision=replace(precision, bf16=True))
    settings = _with_places(settings)
    check_flags(settings)
    check_objective_flags(settings)
    options, model = model_options(settings, NO_DROPOUT), _model(settings)
    options = replace(options, lora=_adapters(settings, model))
    config = changed(model, {"dtype": options.dtype})
    check_kind(settings, model_type(settings, config if settings.checkpointing.load else None))
    parallel = settings.parallel
    ranks = world or prod(
        (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
        )
    )
    sizes = work_out(settings, config, options, ranks)
    work = work_of(settings)
    encoder = _encoder(settings, multimodal_model(settings))
    found = Described(config, sizes, options, optimizer_options(settings), work, encoder=encoder)
    if settings.distilling.teacher_load is not None:
        found = _taught(found, settings)
    if options.lora is not None:
        check_targets(config, options.lora.targets, found=bool(found.run.adapters))
    _check_room(settings, sizes)
    return found


def _encoder(settings: Settings, directory: Path | None) -> Encoder | None:
    """Return the encoder of a multimodal model, if the data may have images: a corpus has none. Raises CheckpointError."""
    data = settings.data
    has_texts = data.data_path or data.mock_data or settings.tasks.task
    return None if directory is None or has_texts else encoder_of(directory)


def _taught(run: Described, settings: Settings) -> Described:
    """Return the run with the teacher of --teacher-load. Raises CheckpointError."""
    given = settings.distilling.teacher_load
    assert given is not None
    refuse_taught(run.config)
    config = read_model(given)
    check_teacher(config, given)
    require_tokens(config, run.config, given)
    if run.encoder is None:
        return run.taught_by(config)
    directory = multimodal_directory(settings.distilling.teacher_image_encoder, given, TEACHER_FLAG)
    return run.taught_by(config, _encoder(settings, directory))


def _check_room(settings: Settings, sizes: Sizes) -> None:
    """Raise UsageError if a sequence has no room for a prompt before its completion."""
    grpo = settings.grpo
    completes = grpo.grpo or settings.distilling.distill_on_policy
    if completes and sizes.seq <= grpo.max_completion_length:
        raise UsageError(
            f"--seq-length {sizes.seq} has no room for a prompt and --max-completion-length {grpo.max_completion_length}; "
            "raise it, or shorten completions"
        )


def _settings(world: int | None, words: list[str]) -> Settings:
    """Return the settings of flags, with MODEL and DATA of `finetune` before them. DATA is not read, and may be missing."""
    named = list(takewhile(lambda word: not word.startswith("-"), words))
    if len(named) > 2:
        raise UsageError(
            f"plan takes MODEL and DATA first, then flags; found {' '.join(named)!r} before the flags"
        )
    flags = words[len(named) :]
    settings, _ = parse(
        "pretrain",
        [*(("--load", named[0]) if named else ()), *flags],
        beside=_own_parser(),
    )
    if named and "--load" in flags:
        raise UsageError("--load is already set by MODEL; give one of them")
    if named and (world or 1) > 1 and not SHARDINGS & settings.given:
        # As `finetune MODEL DATA` does.
        parallel = replace(settings.parallel, use_distributed_optimizer=True)
        settings = replace(settings, parallel=parallel)
    return settings


def _with_places(settings: Settings) -> Settings:
    """Return the settings with names for examples, pairs, prompts and rewards, which a plan does not read."""
    data, grpo = settings.data, settings.grpo
    has_data = data.finetune_data or data.data_path or settings.tasks.task
    of_objective = (
        settings.dpo.dpo
        or settings.kto.kto
        or settings.rewards.reward_modeling
        or settings.embeddings.embedding
        or grpo.grpo
        or settings.distilling.distill_on_policy
    )
    if of_objective or (settings.training.epochs and not has_data):
        named = data.finetune_data or ("DATA",)
        settings = replace(settings, data=replace(data, finetune_data=named))
    if grpo.grpo and not grpo.reward:
        # With --reward-weights, there is a function for each weight.
        functions = ("REWARD",) * len(grpo.reward_weights or (1.0,))
        settings = replace(settings, grpo=replace(grpo, reward=functions))
    return settings


def _adapters(settings: Settings, config: ModelConfig) -> LoRA | None:
    """Return the options of the adapters; None if all weights are trained."""
    if settings.lora.lora_load is not None:
        raise NotExpressible(
            "plan reads no adapter; give --lora-rank and --lora-targets in place of --lora-load"
        )
    options = adapter_options(settings)
    if options is None:
        return None
    return beside_layers(options, settings.lora, config)


def _model(settings: Settings) -> ModelConfig:
    load = settings.checkpointing.load
    if load is None:
        if settings.model.vocab_size is None:
            raise UsageError(
                "--vocab-size is missing: no tokenizer is read to plan (or --load a model)"
            )
        return model_from_flags(settings, settings.model.vocab_size)
    config = read_model(load)
    refuse_whole(config, load)
    if settings.rewards.reward_modeling:
        config = scored(config, load)
    else:
        refuse_scores(config, load)
    try:
        check_computed(config)  # first, because check_against needs Megatron's args of the model
    except NotExpressible as error:
        raise NotExpressible(
            f"{load}: {error}; `megaconv plan {load}` lists the layouts that it can have, with their memory"
        ) from None
    check_against(settings, config, {}, load)
    return config


def read_model(load: str) -> ModelConfig:
    """Read a model's configuration from config.json, or from a checkpoint's headers if there is no config.json."""
    path = Path(load)
    file = path / CONFIG_NAME if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        is_multimodal = file.name == CONFIG_NAME and has_text_only(file.parent)
        return read_config(file, text_only=is_multimodal, whole=True)[1]
    from megaconv.commands.inspection import inspect
    from megaconv.options import LoadOptions

    return inspect(
        path if path.exists() else load, LoadOptions(optimizer=False), None, check_source=False
    ).header.config
