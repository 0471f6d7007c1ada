"""`--method`: averages along an arc and by differences, in all formats and layouts; and what is refused."""

import signal
from pathlib import Path

import pytest
import torch

import megaconv
from megaconv.errors import UsageError
from tests.engine.averaged_models import weights, write_delta_nets, write_models
from tests.engine.test_interrupted import KILL
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run

METHODS = {
    "slerp": ["--method", "slerp"],
    "ties": ["--method", "ties", "--density", "0.3"],
    "dare": ["--method", "dare", "--density", "0.3"],
    "dare-ties": ["--method", "dare-ties", "--density", "0.3", "--seed", "2"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_the_same_bits_in_all_formats_and_layouts(
    method: str, models: list[Path], tmp_path: Path
) -> None:
    count = 2 if method == "slerp" else 3
    plain = [models[0].parent / f"hf{number}" for number in range(count)]
    options = [*METHODS[method], "--workers", "1"]
    outcome = run("average", *plain, "--save-dir", tmp_path / "plain", *options)
    assert outcome.status == 0, outcome.err
    assert method in outcome.err
    base, *others = models[:count]
    added = [word for other in others for word in ("--average", other)]
    words = ["convert", base, tmp_path / "core", *added, *METHODS[method], "--workers", "4"]
    sharded = run(*words, "--saver", "core", "--tp", "2", "--pp", "2", "--verify")
    assert sharded.status == 0, sharded.err
    assert megaconv.diff(tmp_path / "plain", tmp_path / "core").same
    assert not megaconv.diff(tmp_path / "plain", base).same


def test_dare_that_keeps_everything_adds_the_differences(
    models: list[Path], tmp_path: Path
) -> None:
    base, *others = (models[0].parent / f"hf{number}" for number in range(3))
    words = ["average", base, f"{others[0]}:0.5", f"{others[1]}:-0.25", "--save-dir"]
    keeping = ["--method", "dare", "--density", "1", "--dtype", "fp32"]
    assert run(*words, tmp_path / "dare", *keeping).status == 0
    assert run(*words, tmp_path / "linear", "--dtype", "fp32").status == 0
    made, expected = weights(tmp_path / "dare"), weights(tmp_path / "linear")
    for name, tensor in expected.items():
        torch.testing.assert_close(made[name], tensor, rtol=0, atol=1e-7)


def test_ties_without_shares_weights_all_differences_alike(
    models: list[Path], tmp_path: Path
) -> None:
    names = [str(model) for model in models]
    plain = megaconv.average(names, tmp_path / "plain", method="ties", density=0.5)
    equal = [names[0], *(f"{name}:0.5" for name in names[1:])]
    again = megaconv.average(equal, tmp_path / "equal", method="ties", density=0.5)
    assert plain.fingerprint == again.fingerprint


@pytest.mark.parametrize("pair", [(2, 3), (0, 3)], ids=["both shifted", "one shifted"])
def test_an_arc_is_that_of_the_numbers_that_norms_multiply_with(
    pair: tuple[int, int], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    nets = write_delta_nets(tmp_path_factory.mktemp("delta-nets"))
    stored = [nets[number] for number in pair]
    plain = [nets[number % 2] for number in pair]
    options = [*METHODS["slerp"], "--dtype", "fp32"]
    assert run("average", *stored, "--save-dir", tmp_path / "out", *options).status == 0
    assert run("average", *plain, "--save-dir", tmp_path / "plain", *options).status == 0
    assert megaconv.diff(tmp_path / "out", tmp_path / "plain").same


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["A", "B", "--method", "tie"], "--method tie: expected one of linear, slerp, ties"),
        (["A", "B", "C", "--method", "slerp"], "--method slerp takes two models, found 3"),
        (["A", "B", "--method", "ties"], "--method ties needs --density"),
        (["A", "B", "--density", "0.5"], "--density has no effect with --method linear"),
        (
            ["A", "B", "--method", "dare", "--density", "0"],
            "--density 0: expected a number above 0",
        ),
        (
            ["A", "B", "--method", "slerp", "--seed", "3"],
            "--seed has no effect with --method slerp",
        ),
        (
            ["A", "B", "--seed", "3"],
            "it belongs to an average (convert --average, or average) with --method dare or dare-ties",
        ),
        (["A:0.5", "B", "--method", "ties", "--density", "1"], "the first model has no share"),
        (["A", "B:-1", "--method", "ties", "--density", "1"], "--method ties needs shares above 0"),
    ],
)
def test_what_a_method_does_not_take_is_one_line(
    words: list[str], message: str, tmp_path: Path
) -> None:
    for word in words:
        if word[0] in "ABC":
            write_llama(tmp_path / word[0], layers=1)
    places = [f"{tmp_path}/{word}" if word[0] in "ABC" else word for word in words]
    assert_refused(run("average", *places, "--save-dir", tmp_path / "out"), 2, message)
    assert not (tmp_path / "out").exists()


def test_a_method_without_models_to_average_is_refused(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    with pytest.raises(UsageError, match="--method slerp: has no effect without --average"):
        megaconv.convert(model, tmp_path / "out", saver="hf", method="slerp")


def test_a_killed_run_is_not_continued_by_another_method(
    models: list[Path], tmp_path: Path
) -> None:
    words = ["average", *models[:2], "--resume", "--workers", 1, "--save-dir"]
    kill = KILL.format(owner="os", name="pwrite", number=30, journaled="pass")
    killed = finish(start(*words, tmp_path / "out", *METHODS["ties"], before=kill))
    assert killed.status == -signal.SIGKILL, killed
    assert run(*words, tmp_path / "out", *METHODS["dare"]).status == 0
    assert run(*words, tmp_path / "whole", *METHODS["dare"]).status == 0
    assert megaconv.diff(tmp_path / "out", tmp_path / "whole").same
