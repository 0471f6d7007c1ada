"""The objects beside the tensors that Megatron core looks for when it loads a distributed checkpoint."""

from pathlib import Path

import pytest
from torch.distributed import checkpoint as dcp

import megaconv
from tests.optimizer_readers import version_of
from tests.trainer.loop.launches import DEEPSEEK, LLAMA, train
from tests.trainer.loop.test_hybrid_runs import HYBRID

MODELS = {"llama": LLAMA, "deepseek": DEEPSEEK, "hybrid": HYBRID}


def extra_states(path: Path) -> set[str]:
    keys = dcp.FileSystemReader(version_of(path)).read_metadata().state_dict_metadata
    return {key for key in keys if "_extra_state" in key}


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        pytest.param("llama", "transformer_engine", marks=pytest.mark.slow),
        ("deepseek", "transformer_engine"),
        pytest.param("hybrid", "transformer_engine", marks=pytest.mark.slow),
        pytest.param("deepseek", "local", marks=pytest.mark.slow),
    ],
)
def test_a_run_saves_the_extra_states_that_the_converter_writes(
    name: str, impl: str, tmp_path: Path
) -> None:
    words = f"pretrain {MODELS[name]} --train-iters 2 --save run --transformer-impl {impl}"
    train(tmp_path, 2, f"{words} --pp 2")
    megaconv.convert(
        tmp_path / "run",
        tmp_path / "out",
        saver="core",
        ckpt_format="torch_dist",
        transformer_impl=impl,
    )
    found, wanted = extra_states(tmp_path / "run"), extra_states(tmp_path / "out")
    assert found == wanted, found ^ wanted
    assert any("final_" in key for key in found) == (impl == "transformer_engine")
