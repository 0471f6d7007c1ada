"""Runs of models with an indexer: they go on as if they had not been interrupted, and the indexer's weights stay."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_hugging_face_starts import FINETUNE
from tests.transformers_oracle import MIXTURES, create

pytestmark = pytest.mark.oracle


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_run_goes_on_and_trains_everything_but_the_indexer(form: str, tmp_path: Path) -> None:
    create(MIXTURES["deepseek_v32"], tmp_path / "hf")
    run = f"finetune --load hf --train-iters 4 --ckpt-format {form} {FINETUNE}"
    train(tmp_path, 1, f"{run} --save whole")
    whole = [line["loss"] for line in metrics(tmp_path)]
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path, 1, f"{run} --save run --exit-interval 2")
    train(tmp_path, 1, f"{run} --save run --resume")
    assert [line["loss"] for line in metrics(tmp_path)] == whole

    megaconv.convert(tmp_path / "run", tmp_path / "back", saver="hf", config=tmp_path / "hf")
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".indexer." in name} <= unchanged
    assert not any(name.endswith("proj.weight") for name in unchanged if ".indexer." not in name)
