"""ms-swift's Megatron runs: checkpoints of core with args that name no sizes, and a config.json that may lie beside."""

import json
import os
import shutil
from pathlib import Path

import pytest

import megaconv
from megaconv.errors import UsageError
from megaconv.megatron.arguments.harmless import HARMLESS
from megaconv.megatron.arguments.known import READ, REFUSED
from megaconv.megatron.arguments.swift import OF_MODEL, OF_RUN
from tests import swift_arguments
from tests.conftest import FIXTURES
from tests.neighbours import own_args, write_swift
from tests.runs import assert_refused, run

FIXTURE = "dist-llama-tp2pp2"
ARGUMENTS = json.loads(swift_arguments.FILE.read_text())
INSTALLED = os.environ.get("MS_SWIFT", "")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "hf"
    megaconv.convert(FIXTURES / FIXTURE, target, saver="hf")
    return target


def test_a_run_is_described_by_the_config_that_was_exported_beside_it(
    hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_directory = write_swift(tmp_path / "checkpoint-10")
    shutil.copy(hf / "config.json", run_directory)
    expected = megaconv.fingerprint(FIXTURES / FIXTURE).weights
    for path in (run_directory, run_directory / "iter_0000010"):
        assert megaconv.fingerprint(path).weights == expected
    assert not caplog.records
    megaconv.convert(run_directory, tmp_path / "core", saver="core", tp=2, verify=True)
    assert own_args(FIXTURE).hidden_size == megaconv.open(tmp_path / "core").config.hidden


def test_without_a_config_it_is_asked_for_by_the_name_of_the_model(
    hf: Path, tmp_path: Path
) -> None:
    path = write_swift(tmp_path / "checkpoint-10")
    assert_refused(run("fingerprint", path), 2, "ms-swift", "'a/b'", "--config")
    with pytest.raises(UsageError, match="--config"):
        megaconv.fingerprint(path)
    assert megaconv.fingerprint(path, config=hf) == megaconv.fingerprint(FIXTURES / FIXTURE)


def test_only_arguments_that_may_change_the_model_are_warned_of(
    hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "learned_later": 1}
    megaconv.fingerprint(write_swift(tmp_path / "run", **scaled), config=hf)
    (record,) = caplog.records
    assert "args have learned_later, rope_scaling, which may change" in record.getMessage()


def test_arguments_of_ms_swift_in_other_runs_are_still_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simple = (bool, int, float, str)
    sizes = {name: each for name, each in vars(own_args(FIXTURE)).items() if type(each) in simple}
    megaconv.fingerprint(write_swift(tmp_path / "run", **sizes, swift_version=None))
    assert "bridge_backend" in caplog.text
    assert "no known release of Megatron" in caplog.text


def test_every_argument_of_ms_swift_is_in_one_list() -> None:
    """Megatron's lists come first: an argument of both means the same in both."""
    known = READ.union(REFUSED, *HARMLESS.values())
    assert not OF_RUN & OF_MODEL
    assert not (OF_RUN | OF_MODEL) & known
    assert ARGUMENTS.keys() - known == OF_RUN | OF_MODEL


@pytest.mark.skipif(not INSTALLED, reason="MS_SWIFT names no folder `swift` of ms-swift 4.6.0")
def test_the_list_is_that_of_the_installed_ms_swift() -> None:
    assert swift_arguments.arguments(Path(INSTALLED)) == ARGUMENTS
