"""The norm inside Megatron's Mamba 2 has the epsilon 1e-5, whatever the epsilon of all other norms is."""

import shutil
from pathlib import Path

import pytest
import torch

import megaconv
from megaconv.errors import NotExpressible
from megaconv.families import families
from megaconv.megatron.arguments.mamba import mixer_epsilon
from megaconv.megatron.arguments.notices import run_notices
from tests.config_models import raw_config
from tests.families.test_families import write_model
from tests.optimizer_models import load


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Megatron like a Bamba, with --norm-epsilon 1e-6 and without a config.json."""
    root = tmp_path_factory.mktemp("bamba")
    hf = write_model(root / "hf", "bamba", **raw_config("bamba", rms_norm_eps=1e-5))
    megaconv.convert(hf, root / "core", saver="core")
    shutil.rmtree(root / "core" / "hf")
    (root / "core" / "megaconv.json").unlink()
    (file,) = (root / "core").glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    vars(state["args"]).update(norm_epsilon=1e-6, layernorm_epsilon=1e-6)
    torch.save(state, file)
    return root / "core"


def test_a_run_of_megatron_keeps_both_epsilons_in_megatron(run: Path, tmp_path: Path) -> None:
    megaconv.convert(run, tmp_path / "out", saver="core", ckpt_format="torch_dist")
    config = megaconv.open(tmp_path / "out").config
    assert (config.norm.epsilon, mixer_epsilon(config)) == (1e-6, 1e-5)


def test_transformers_has_one_epsilon_for_all_norms_of_a_bamba(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotExpressible, match=r"mamba\.out_epsilon"):
        megaconv.convert(run, tmp_path / "out", saver="hf")


def test_a_run_that_starts_from_another_epsilon_says_for_whom_its_checkpoints_are() -> None:
    table = families()["bamba"]
    assert run_notices(table.read_hf(raw_config("bamba", rms_norm_eps=1e-5))) == ()
    (notice,) = run_notices(table.read_hf(raw_config("bamba", rms_norm_eps=1e-6)))
    assert notice.startswith(
        "Megatron core's Mamba 2 has the epsilon 1e-05 inside, this model's has 1e-06: its checkpoints are for"
    )


def test_a_bamba_with_another_epsilon_is_refused_towards_megatron(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", "bamba", **raw_config("bamba", rms_norm_eps=1e-6))
    with pytest.raises(
        NotExpressible, match="has the epsilon 1e-06; in Megatron it always has 1e-05"
    ):
        megaconv.convert(hf, tmp_path / "core", saver="core")
