"""The converter where torch isn't installed: all that users do works, and what needs torch says so in one line."""

import sys
from pathlib import Path

import pytest

from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish, start

WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'safetensors', 'transformers', 'megatron'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Blocked())
"""
"""A start that makes imports of these packages fail, as in an environment without them."""


def run(*arguments: object) -> Outcome:
    return finish(start(*arguments, before=WITHOUT), 60)


def python(program: str) -> Outcome:
    import subprocess

    found = subprocess.run(
        [sys.executable, "-c", WITHOUT + program], capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return Outcome(found.returncode, found.stdout, found.stderr)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "hf")


def test_the_block_is_one() -> None:
    assert "No module named 'torch'" in python("import torch").err


def test_the_demonstration_runs() -> None:
    outcome = run("demo")
    assert outcome.status == 0, outcome
    assert "All equal: the same model, bit for bit." in outcome.out


def test_the_usual_commands_need_no_torch(model: Path, tmp_path: Path) -> None:
    core, back, half = (tmp_path / name for name in ("core", "back", "half"))
    for arguments in (
        [
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            core,
            "--ckpt-format",
            "torch_dist",
            "--verify",
        ],
        ["convert", "--load-dir", core, "--saver", "hf", "--save-dir", back],
        [
            "convert",
            "--load-dir",
            core,
            "--saver",
            "core",
            "--save-dir",
            half,
            "--dtype",
            "fp16",
            "--tp",
            2,
        ],
        ["inspect", core],
        ["fingerprint", core],
        ["verify", core],
        ["diff", model, back],
        ["scan", core],
        ["formats"],
    ):
        outcome = run(*arguments)
        assert outcome.status == 0, (arguments, outcome)


def test_diff_measures_distances_without_torch(model: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    outcome = run("diff", model, other)
    assert (outcome.status, outcome.err) == (4, "")
    assert "largest difference 0." in outcome.out


def test_loading_a_tensor_without_torch_is_an_error_of_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"""
import megaconv
from megaconv.errors import UsageError
try:
    megaconv.open({str(model)!r}).load('head.weight')
except UsageError as error:
    print(error)
"""
    assert python(program).out == (
        "loading a tensor needs torch (No module named 'torch'); in a clone of megaconv: pip install '.[torch]'\n"
    )
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }.items():
        monkeypatch.setenv(name, value)
    outcome = run("convert", "--load-dir", model, "--saver", "core", "--save-dir", tmp_path / "out")
    assert_refused(
        outcome,
        2,
        "several processes needs torch",
        "in a clone of megaconv: pip install '.[torch]'",
    )


def test_a_draft_of_a_family_names_the_extras_of_torch_and_of_transformers(model: Path) -> None:
    refused = run("new-family", model, "--save", model.parent / "family.py")
    assert_refused(refused, 2, "new-family needs torch", "pip install '.[torch,data]'")
