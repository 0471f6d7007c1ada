"""The parser of the trainer's commands other than pretrain and finetune."""

from pathlib import Path

import pytest

from megaconv.errors import UsageError
from megatron_lite.commands.command_line import run
from megatron_lite.data import preprocess
from megatron_lite.data.finetuning.chat import read_template
from megatron_lite.inference.commands import generate
from megatron_lite.retrieval.commands import embed
from megatron_lite.settings.arguments import parse


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


def test_a_suggestion_has_the_short_spelling_too() -> None:
    nearest = r"did you mean --tensor-model-parallel-size \(--tp\)\?"
    with pytest.raises(UsageError, match=nearest):
        generate.parser().parse_args(["--load", "model", "--tensor-parallel", "2"])
    with pytest.raises(UsageError, match=nearest):
        parse("pretrain", ["--tensor-parallel", "2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve model --prt 8000", "unknown flag --prt; did you mean --port?"),
        ("serve model --seq-len 8", "unknown flag --seq-len; did you mean --seq-length?"),
        ("serve model --zebra", "unknown flag --zebra; --help lists all flags"),
        ("evaluate model --tsk LAMBADA", "unknown flag --tsk; did you mean --task?"),
        (
            "evaluate model --tsk LAMBADA --fim-rate 0.5",
            "2 flags can't be taken. unknown flag --tsk; did you mean --task? "
            "--fim-rate: fill in the middle is not supported yet; leave it out",
        ),
        (
            "evaluate model --tasks arc_easy",
            "--tasks: give `megatron-lite evaluate` --lm-eval with the names of lm-eval's tasks, separated by blanks",
        ),
        (
            "embed --output index --bert-laod x",
            "unknown flag --bert-laod; did you mean --bert-load?",
        ),
        ("plan --worldsize 8", "unknown flag --worldsize; did you mean --world-size?"),
        ("plan --zebra", "unknown flag --zebra; --help lists all flags"),
        ("models --zebra", "unrecognized arguments: --zebra; --help lists all flags"),
        ("recipes one two", "unrecognized arguments: two; --help lists all flags"),
        ("plot", "the following arguments are required: RUN; --help lists all flags"),
        ("completion", "the following arguments are required: shell; --help lists all flags"),
    ],
)
def test_a_wrong_word_is_one_line_with_a_flag_of_the_command(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"megatron-lite: error: {message}\n"


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    place = tmp_path / "template.jinja"
    with pytest.raises(UsageError) as refused:
        read_template(str(place))
    assert str(refused.value).count(str(place)) == 1
    assert str(refused.value).endswith("can't be read: No such file or directory")
