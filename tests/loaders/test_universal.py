"""DeepSpeed's universal checkpoints: what ds_to_universal of deepspeed 0.19.8 made of the ZeRO checkpoints in the fixtures."""

import shutil
from pathlib import Path

import pytest
import torch

import megaconv
from formats import zero_universal
from formats.pickle_records import Global, Opaque
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run

GROUPS, FLAT = "zero2-llama-tied-groups-dp2", "zero3-llama-dp2"
CASES = pytest.mark.parametrize("case", [GROUPS, FLAT])
STEP = "global_step3_universal"


def universal(case: str) -> Path:
    return FIXTURES / f"universal-{case}"


@CASES
def test_weights_and_optimizer_are_those_of_the_checkpoint_that_it_was_made_of(case: str) -> None:
    original, found = FIXTURES / f"deepspeed-{case}" / "checkpoint", universal(case)
    assert megaconv.fingerprint(found) == megaconv.fingerprint(original)
    assert megaconv.open(found).header.training == megaconv.open(original).header.training


@CASES
def test_it_goes_on_in_megatron(case: str, tmp_path: Path) -> None:
    options = {} if case == GROUPS else {"weight_decay": "megatron"}  # norms decay there
    report = megaconv.convert(
        universal(case) / STEP,
        tmp_path / "core",
        saver="core",
        tp=2,
        ckpt_format="torch_dist",
        options=options,
    )
    assert megaconv.fingerprint(tmp_path / "core") == report.fingerprint
    assert "deepspeed, universal, of ZeRO" in run("inspect", universal(case)).out


def test_the_stage_is_read_from_a_number_or_a_member_by_value_or_name() -> None:
    module = "deepspeed.runtime.zero.config"
    for stage, name in ((1, "optimizer_states"), (2, "gradients"), (3, "weights")):
        by_value = Opaque(module, "ZeroStageEnum", (stage,))
        by_name = Global(module, f"ZeroStageEnum.{name}")
        assert [zero_universal._stage(each) for each in (stage, by_value, by_name)] == [stage] * 3
    assert zero_universal._stage(None) == 2


def copy(tmp_path: Path, case: str = GROUPS) -> Path:
    return Path(shutil.copytree(universal(case), tmp_path / "in"))


def test_a_parameter_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    path = copy(tmp_path)
    place = path / STEP / "zero" / "model.norm.weight"
    shutil.copytree(place, place.with_name("model.other.weight"))
    assert_refused(run("fingerprint", path), 3, "has model.other.weight")
    shutil.rmtree(place.with_name("model.other.weight"))
    shutil.rmtree(place)
    assert_refused(run("fingerprint", path), 3, "has no model.norm.weight")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = copy(tmp_path)
    (path / STEP / "zero" / "model.norm.weight" / "exp_avg.pt").unlink()
    assert_refused(run("fingerprint", path), 3, "model.norm.weight/exp_avg.pt: no such file")


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    path = copy(tmp_path, FLAT)
    torch.save(torch.zeros(7), path / STEP / "zero" / "model.norm.weight" / "fp32.pt")
    assert_refused(
        run("fingerprint", path), 3, "model.norm.weight/fp32.pt: is [7], the parameter [32]"
    )


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    path = copy(tmp_path)
    file = path / STEP / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["param_shapes"][0]["../../secret"] = torch.Size([1])
    torch.save(state, file)
    assert_refused(run("fingerprint", path), 6, "'../../secret' is no directory in zero/")
