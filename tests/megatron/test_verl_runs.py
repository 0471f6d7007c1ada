"""Distributed checkpoints of verl's Megatron runs, which keep weights and optimizer in directories of their own.

The fixture was saved by verl's MegatronCheckpointManager. The marked test makes such checkpoints with verl itself, in the Python
that VERL_PYTHON names, and compares them with the rank files that Megatron saved of the same step.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

import megaconv
from tests import verl_oracle
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

VERL = os.environ.get("VERL_PYTHON", "")
FIXTURE = FIXTURES / "verl-megatron-tp2pp2"
ACTOR, CONFIG = FIXTURE / "actor", FIXTURE / "huggingface"
SOURCE = FIXTURES / "core-llama-optim-tp2pp2/checkpoint"
WEIGHTS = "4e1b76628c9be4df67a93f6df1ea784ca5b8d88eca6b7790a4f93ca6abb3b006"
OPTIMIZER = "ed1e41bcc8aa1a45adadd1dfebfbcff8a8246162c069062cea4c28cd1cea2535"
"""Fingerprints of the rank files that Megatron saved beside the fixture, of the same step."""


@pytest.mark.parametrize("path", [ACTOR, ACTOR / "model/dist_ckpt"], ids=["actor", "weights"])
def test_weights_and_optimizer_of_two_directories_are_one_checkpoint(path: Path) -> None:
    found = megaconv.fingerprint(path, config=CONFIG)
    assert (found.weights, found.optimizer) == (WEIGHTS, OPTIMIZER)


def test_the_layout_the_step_and_the_schedule_are_those_of_the_run() -> None:
    header = megaconv.open(ACTOR, config=CONFIG).header
    assert (header.layout.tp, header.layout.pp) == (2, 2)
    assert header.training.iteration == 2
    assert header.training.optimizer is not None
    assert header.training.optimizer.step == 3
    assert header.training.scheduler is not None
    assert header.training.scheduler["max_lr"] == 0.01
    assert header.source == "core, torch_dist format of verl"


def test_the_config_that_verl_saved_is_found(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    shutil.copytree(CONFIG, actor / "model/huggingface")
    assert megaconv.fingerprint(actor).optimizer == OPTIMIZER


def test_a_run_goes_on_in_other_software_and_layouts(tmp_path: Path) -> None:
    for saver, options in (("core", {"tp": 1, "pp": 2}), ("dcp", {}), ("deepspeed", {})):
        target = tmp_path / saver
        megaconv.convert(ACTOR, target, saver=saver, config=CONFIG, optimizer=True, **options)
    assert megaconv.fingerprint(tmp_path / "core").optimizer == OPTIMIZER


def test_weights_without_an_optimizer_are_read(tmp_path: Path) -> None:
    actor = copy(tmp_path)
    shutil.rmtree(actor / "optimizer")
    found = megaconv.fingerprint(actor, config=CONFIG)
    assert (found.weights, found.optimizer) == (WEIGHTS, None)


def test_the_optimizer_of_another_layout_is_refused(tmp_path: Path) -> None:
    """Buckets hold the tensors of a rank. The file that gives the layout is wrong here."""
    actor = copy(tmp_path)
    file = actor / "transformer_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "tensor_model_parallel_size": 1}))
    refused = run("convert", actor, tmp_path / "out", "--saver", "core", "--config", CONFIG)
    assert_refused(refused, 3, "optimizer/dist_ckpt", "--no-optimizer")
    assert not (tmp_path / "out").exists()


def test_an_optimizer_without_its_weights_is_refused() -> None:
    refused = run("fingerprint", ACTOR / "optimizer/dist_ckpt", "--config", CONFIG)
    assert_refused(refused, 3, "holds the optimizer of a verl run without its weights")


@pytest.mark.parametrize("name", ["transformer_config.json", "ckpt_contents.json"])
def test_settings_of_another_form_are_refused(name: str, tmp_path: Path) -> None:
    actor = copy(tmp_path)
    (actor / name).write_text("[1]")
    assert_refused(run("fingerprint", actor, "--config", CONFIG), 3, name, "found list")


@pytest.mark.verl
@pytest.mark.skipif(not VERL, reason="VERL_PYTHON names no Python with verl 0.9.1")
@pytest.mark.parametrize(
    ("sharding", "tp", "pp"),
    [
        ("fully_reshardable", 2, 1),
        ("fully_reshardable", 2, 2),
        ("dp_reshardable", 2, 2),
        ("dp_reshardable", 1, 1),
    ],
)
def test_what_verl_saves_is_what_megatron_saves(
    sharding: str, tp: int, pp: int, tmp_path: Path
) -> None:
    megaconv.convert(
        SOURCE, tmp_path / "in", saver="core", tp=tp, pp=pp, use_distributed_optimizer=True,
        transformer_impl="local", options={"release": "0.19"},
    )  # fmt: skip
    megaconv.convert(SOURCE, tmp_path / "hf", saver="hf")
    given = (tmp_path / "in", tmp_path / "out", tmp_path / "hf", sharding)
    verl_oracle.save(VERL, 4, tmp_path, "megatron", *given)
    (tmp_path / "out/core/latest_checkpointed_iteration.txt").write_text("2")
    expected = megaconv.fingerprint(tmp_path / "out/core")
    found = megaconv.fingerprint(tmp_path / "out/actor", config=tmp_path / "hf")
    assert (found.weights, found.optimizer) == (expected.weights, expected.optimizer)


def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ACTOR, tmp_path / "actor"))
