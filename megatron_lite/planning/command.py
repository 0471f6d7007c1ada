"""`megatron-lite plan`: predicts the needs of a run without starting it."""

import argparse
import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

from megaconv.errors import CheckpointError, NotExpressible, UsageError
from megaconv.families import read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.planning.gpus import DEFAULT_GPU, gpu_named
from megaconv.terminal import show
from megatron_lite.models.trainable import refuse_pairs, refuse_scores, refuse_whole
from megatron_lite.objectives.scored_model import scored
from megatron_lite.planning.report import Planned
from megatron_lite.planning.stages import Described
from megatron_lite.settings.architecture import check_against, model_from_flags
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import Settings
from megatron_lite.settings.objective_flags import check_objective_flags
from megatron_lite.settings.run_options import model_options, optimizer_options
from megatron_lite.settings.sizes import work_out

DESCRIPTION = """\
Memory of each rank, bytes between ranks, the pipeline's bubble and the estimated time of a step, without starting it or reading a weight.

--world-size N       ranks of the run (as few as tp x cp x pp)
--gpu NAME           GPU for the estimated time of a step, such as h800 or a100; h100 by default
--json               for programs
--load PATH          a config.json, or any checkpoint that megaconv reads; without it flags describe the model

All other flags are those of `megatron-lite pretrain`, which see; bf16 where no precision is given.

example:
  megatron-lite plan --load Llama-3.1-405B --world-size 8192 --tp 8 --pp 16 --num-virtual-stages-per-pipeline-rank 8 \\
      --sequence-parallel --use-distributed-optimizer --seq-length 8192 --global-batch-size 2048
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
        text = json.dumps(planned.to_json(), indent=2) if own.json else None
        lines = list(planned.lines()) if text is None else []
    except CheckpointError as error:
        show(f"megatron-lite: error: {error}", sys.stderr)
        return error.exit_status
    if text is not None:
        print(text)
    for line in lines:
        show(line)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; --help lists the flags of plan")


def _own_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron-lite plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--gpu", default=DEFAULT_GPU)
    parser.add_argument("--json", action="store_true")
    return parser


def describe(world: int | None, words: list[str]) -> Described:
    """Return the run that flags of pretrain describe. Raises CheckpointError for flags that pretrain refuses too."""
    if world is not None and world < 1:
        raise UsageError(f"--world-size {world} must be 1 or more")
    settings, _ = parse("pretrain", words)
    training, precision = settings.training, settings.precision
    if not (training.train_iters or training.train_samples or training.epochs):
        settings = replace(settings, training=replace(training, train_iters=1))
    if not precision.chosen:
        settings = replace(settings, precision=replace(precision, bf16=True))
    if settings.lora.wanted or settings.dpo.dpo or settings.grpo.grpo:
        raise NotExpressible(
            "adapters, --dpo and --grpo can't be planned yet; leave their flags out"
        )
    of_pairs = settings.rewards.reward_modeling
    if of_pairs:
        settings = _with_pairs(settings)
    check_objective_flags(settings)
    options = model_options(settings, NO_DROPOUT)
    config = changed(_model(settings), {"dtype": options.dtype})
    parallel = settings.parallel
    ranks = world or prod(
        (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
        )
    )
    sizes = work_out(settings, config, options, ranks)
    rows = 2 if of_pairs else 1
    return Described(config, sizes, options, optimizer_options(settings), rows)


def _with_pairs(settings: Settings) -> Settings:
    """Return the settings with a name for pairs of answers, which a plan does not read."""
    data = settings.data
    return replace(settings, data=replace(data, finetune_data=data.finetune_data or ("PAIRS",)))


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
        refuse_pairs(config)
    else:
        refuse_scores(config, load)
    check_against(settings, config, {}, load)
    return config


def read_model(load: str) -> ModelConfig:
    """Read a model's configuration from config.json, or from a checkpoint's headers if there is no config.json."""
    path = Path(load)
    file = path / CONFIG_NAME if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        return read_config(file, whole=True)[1]
    from megaconv.commands.inspection import inspect
    from megaconv.options import LoadOptions

    return inspect(
        path if path.exists() else load, LoadOptions(optimizer=False), None, check_source=False
    ).header.config
