"""Words of other trainers: each leads to a flag or a command that there is, and none is one of ours."""

import pytest

from megaconv.errors import UsageError
from megatron_lite.cli import main
from megatron_lite.commands.catalog import OTHERS
from megatron_lite.settings import other_trainers
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import flags
from megatron_lite.settings.training_commands import DESCRIPTIONS

OURS = {"--" + name.replace("_", "-") for name in flags()}


def test_every_flag_leads_to_one_that_there_is() -> None:
    assert set(other_trainers.FLAGS.values()) <= OURS
    assert not other_trainers.FLAGS.keys() & OURS


def test_every_command_leads_to_one_that_there_is() -> None:
    ours = {*DESCRIPTIONS, *OTHERS}
    assert not other_trainers.COMMANDS.keys() & ours
    for command, *words in map(str.split, other_trainers.COMMANDS.values()):
        assert command in ours
        assert OURS.issuperset(words)


@pytest.mark.parametrize("word", ["--gradient-accumulation-steps", "--gradient_accumulation_steps"])
def test_hyphens_and_underscores_are_the_same(word: str) -> None:
    with pytest.raises(UsageError, match=f"unknown flag {word}; did you mean --global-batch-size"):
        parse("finetune", [word, "4"])


def test_a_command_of_others_names_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sft", "model", "data.jsonl"])
    assert ended.value.code == 2
    line = "megatron-lite: error: unknown command 'sft'; `megatron-lite finetune` does that\n"
    assert capsys.readouterr().err == line
