"""--ckpt-convert-format: a checkpoint in another format, and no step."""

from dataclasses import replace
from pathlib import Path

import pytest

import megaconv
from megaconv.errors import UsageError
from megatron_lite.loop.format_change import with_changed_format
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import Settings
from tests.trainer.loop.launches import LLAMA, train


@pytest.mark.slow
def test_a_run_of_two_ranks_saves_what_it_has_loaded_and_goes_on_from_there(tmp_path: Path) -> None:
    train(tmp_path, 1, f"pretrain {LLAMA} --train-iters 2 --save run")
    words = f"pretrain {LLAMA} --tensor-model-parallel-size 2 --train-iters 4 --load run --save run"
    changing = "--ckpt-convert-format torch --ckpt-convert-save changed"
    running = train(tmp_path, 2, f"{words} {changing}")
    assert "loss" not in running.log(0).partition("saved to")[2]
    ranks = sorted(
        path.name for path in (tmp_path / "changed/torch/iter_0000002").glob("mp_rank_*")
    )
    assert ranks == ["mp_rank_00", "mp_rank_01"]
    weights = megaconv.fingerprint(tmp_path / "run").weights
    assert megaconv.fingerprint(tmp_path / "changed/torch").weights == weights
    for source in ("run", "changed/torch"):
        onward = f"pretrain {LLAMA} --train-iters 4 --load {source}"
        train(tmp_path, 1, f"{onward} --save {source.replace('/', '-')}-onward")
    found = {megaconv.fingerprint(path).weights for path in tmp_path.glob("*-onward")}
    assert len(found) == 1
    assert weights not in found


def settings(words: str) -> Settings:
    return parse("pretrain", words.split())[0]


def test_a_command_line_without_the_flags_stays_as_it_is() -> None:
    given = settings("--load x --save y")
    assert with_changed_format(given) == given


def test_the_save_gets_the_formats_name() -> None:
    given = settings("--load x --save y --ckpt-convert-format torch --ckpt-convert-save z")
    expected = replace(given.checkpointing, ckpt_format="torch", save="z/torch")
    assert with_changed_format(given).checkpointing == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load x --ckpt-convert-format torch", "belong together"),
        ("--load x --ckpt-convert-save z", "belong together"),
        ("--ckpt-convert-format torch --ckpt-convert-save z", "needs --load"),
        ("--load z --ckpt-convert-format torch --ckpt-convert-save z", "directory of --load"),
        (
            "--load x --save ./z --ckpt-convert-format torch --ckpt-convert-save z",
            "directory of --save",
        ),
    ],
)
def test_impossible_requests_are_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_changed_format(settings(words))
