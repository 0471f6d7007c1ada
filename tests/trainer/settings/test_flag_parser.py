"""The parser of the trainer's commands other than pretrain and finetune."""

import pytest

from megaconv.errors import UsageError
from megatron_lite.data import preprocess
from megatron_lite.inference.commands import generate
from megatron_lite.retrieval.commands import embed


def test_similar_flags_are_offered_for_unknown_ones() -> None:
    words = ["--load", "model", "--max-new-token", "4", "--temperatur=0"]
    with pytest.raises(UsageError, match=r"did you mean --max-new-tokens, --temperature\?"):
        generate.parser().parse_args(words)


def test_a_flag_that_is_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(
        UsageError, match=r"unrecognized arguments: --zebra; --help lists all flags$"
    ):
        generate.parser().parse_args(["--load", "model", "--zebra"])


def test_a_missing_model_is_asked_for_with_the_command() -> None:
    with pytest.raises(UsageError, match="MODEL is missing; write: megatron-lite generate MODEL"):
        generate.parser().parse_args([])


def test_commands_for_data_and_retrieval_suggest_too() -> None:
    with pytest.raises(UsageError, match="did you mean --append-eod"):
        preprocess.make_parser().parse_args(["--input", "a", "--output-prefix", "b", "--apend-eod"])
    with pytest.raises(UsageError, match="--help lists all flags"):
        embed.parser().parse_args(["--zebra"])
