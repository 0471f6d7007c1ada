"""Command lines of Megatron-LM's README files from 2019 to 2025.

Each flag is understood, accepted without effect, or refused with the reason and what to do.
"""

import argparse
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megaconv.errors import UsageError
from megatron_lite.data.preprocess import make_parser
from megatron_lite.inference.commands import evaluate, serve
from megatron_lite.inference.flags import parse_with_training_flags
from megatron_lite.retrieval.commands import embed
from megatron_lite.retrieval.commands.model_flags import parse_with_model_flags
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.earlier_flags import OF_COMMANDS, REPLACED, TODAY
from tests.conftest import FIXTURES
from tests.runs import run

LINES = (FIXTURES / "megatron_command_lines.txt").read_text(encoding="utf-8").splitlines()[1:]

REFUSED = {
    "--batch-size", "--max-preds-per-seq", "--tokenizer-model-type", "--presplit-sentences", "--fp32-embedding",
}  # fmt: skip
"""The flags of these lines that a command refuses, each with what to do instead, unless it is a flag of its own."""


def is_refused(command: str, flag: str) -> bool:
    return flag in REFUSED and flag not in OF_COMMANDS.get(command, {})


def flags_of(line: str) -> list[list[str]]:
    """Each flag of a command line with its values."""
    found: list[list[str]] = []
    for word in shlex.split(line)[1:]:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


def commands(*names: str) -> list[tuple[str, str]]:
    """(the command, the line) for each line of these commands."""
    pairs = [line.split("\t") for line in LINES]
    return [(command, theirs) for command, theirs in pairs if command in names]


def read(command: str, flag: list[str]) -> object:
    """Parse one flag as the command does."""
    if command == "preprocess":
        needed = ["--input", "x", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"]
        return make_parser().parse_args([*needed, *flag])
    if command == "evaluate":
        return parse_with_training_flags(evaluate.parser(), ["--load", "x", *flag])
    if command == "embed":
        return parse_with_model_flags(embed.parser(), ["--output", "x", *flag])
    return parse(command, flag)


@pytest.mark.parametrize(
    ("command", "line"), commands("preprocess", "pretrain", "finetune", "evaluate", "embed")
)
def test_each_flag_is_understood_or_refused_with_what_to_do(command: str, line: str) -> None:
    for flag in flags_of(line):
        name = flag[0]
        if is_refused(command, name):
            with pytest.raises(UsageError, match=f"^{name}: {re.escape(REPLACED[name])}"):
                read(command, flag)
        else:
            assert read(command, flag) is not None


@pytest.mark.parametrize(("command", "line"), commands("pretrain", "finetune", "evaluate", "embed"))
def test_a_line_without_the_refused_flags_is_understood_as_a_whole(command: str, line: str) -> None:
    kept = [flag for flag in flags_of(line) if not is_refused(command, flag[0])]
    assert read(command, [word for flag in kept for word in flag]) is not None


@pytest.mark.parametrize(("command", "line"), commands("convert"))
def test_the_converters_lines_convert(command: str, line: str, tmp_path: Path) -> None:
    kind = "legacy" if "legacy" in line else "core"
    places = {
        "--load-dir": str(FIXTURES / f"{kind}-gpt2-tp1pp1" / "checkpoint"),
        "--save-dir": str(tmp_path / "out"),
    }
    words = [
        word
        for name, *values in flags_of(line)
        for word in (name, *([places[name]] if name in places else values))
    ]
    outcome = run(command, *words)
    assert outcome.status == 0, outcome.err
    assert len(list((tmp_path / "out").glob("*/mp_rank_0?_00?"))) == 4


def test_earlier_flags_mean_what_todays_flags_mean() -> None:
    for earlier, value in {
        "--model-parallel-size": ["2"],
        "--warmup": [".01"],
        "--recompute-activations": [],
        "--checkpoint-activations": [],
        "--checkpoint-num-layers": ["2"],
    }.items():
        assert parse("pretrain", [earlier, *value]) == parse("pretrain", [*TODAY[earlier], *value])
    assert parse("pretrain", ["--warmup=.01"])[0].optimizer.lr_warmup_fraction == 0.01


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("wiki.test.tokens", {"task": "WIKITEXT103", "valid_data": ["wiki.test.tokens"]}),
        ("--cloze-eval", {"task": "LAMBADA", "valid_data": ["lambada.json"]}),
        ("--webtext-eval", {"webtext_eval": True, "eval_iters": 5000, "corpus": ["webtext.json"]}),
    ],
)
def test_the_evaluations_of_2019_are_todays(line: str, named: dict[str, object]) -> None:
    """A whole line of run_gpt2_eval.py: the model, the mode and its data."""
    (words,) = [
        shlex.split(theirs)[1:]
        for _, theirs in commands("evaluate")
        if line in theirs and "--model-path" in theirs
    ]
    given = parse_with_training_flags(evaluate.parser(), evaluate.with_todays_task(words))
    assert (given.load, given.slots, given.tp) == ("gpt2_345m", 16, 1)
    for name, value in named.items():
        assert getattr(given, name) == value, name


def test_a_line_of_create_doc_index_names_the_model_and_the_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ((_, line),) = commands("embed")
    given = parse_with_model_flags(embed.parser(), shlex.split(line)[1:])
    assert (given.load, given.output) == ("/path/to/pretrained_ict", Path("embedded_blocks.pkl"))
    assert (given.indexer_batch_size, given.training.model.hidden_size) == (128, 768)
    assert "--log-interval, --micro-batch-size" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--ict-load", "--indexer-batch-size", "--webtext-eval"])
def test_a_flag_of_another_command_is_refused_with_this_command(flag: str) -> None:
    with pytest.raises(UsageError, match=r"megatron-lite e(mbed|valuate)`"):
        parse("pretrain", [flag, "x"])


@pytest.mark.parametrize("flag", REPLACED)
def test_a_flag_without_counterpart_is_refused_with_what_to_do(flag: str) -> None:
    """This includes flags of the documents' comments and scripts, which no command line has."""
    with pytest.raises(UsageError, match=f"^{flag}: {re.escape(REPLACED[flag])}$"):
        parse("pretrain", [flag, "x"])


def test_flags_without_effect_are_named() -> None:
    words = "--DDP-impl local --cache-dir cache --lazy-loader --resume-dataloader --deep-init --embedding-weights-in-fp32"
    _, ignored = parse("pretrain", words.split())
    assert ignored == [word for word in words.split() if word.startswith("--")]


INFERENCE: dict[str, Callable[..., argparse.Namespace]] = {
    "evaluate": partial(parse_with_training_flags, evaluate.parser()),
    "serve": partial(parse_with_training_flags, serve.parser()),
}


@pytest.mark.parametrize("command", INFERENCE)
def test_a_training_scripts_flags_are_taken_for_inference(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--load x --num-layers 2 --fp16 --micro-batch-size 3 --log-interval 10 --no-load-rng"
    given = INFERENCE[command](words.split())
    assert (given.dtype, given.slots, given.training.model.num_layers) == ("fp16", 3, 2)
    assert capsys.readouterr().err == "without effect here: --no-load-rng, --log-interval\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dtype bf16 --fp16", "--dtype bf16 and --fp16 contradict each other; give one"),
        ("--slots 2 --micro-batch-size 2", "--slots and --micro-batch-size are the same number"),
        ("--context-parallel-size 2", "--context-parallel-size is a flag of training alone"),
        ("--lora-load adapter", "--lora-load is a flag of training alone"),
        ("--no-such-flag", "unknown flag --no-such-flag"),
    ],
)
def test_flags_that_would_change_the_results_are_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        INFERENCE["serve"](["--load", "x", *words.split()])
