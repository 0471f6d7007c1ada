"""Random journeys of a run: weights and optimizer state through Megatron's formats and DeepSpeed's, and back to one rank.

The rank file at the end is compared, by torch alone, with the one that a direct conversion writes.
"""

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import CheckpointError, NotExpressible
from megaconv.model.config import ModelConfig
from tests.engine.journeys import ordinary, target, write_possible
from tests.engine.test_chains import bits
from tests.optimizer_models import load, write_trained

FAMILIES = (
    *("deepseek_v2", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "mixtral", "nemotron_h"),
    *("olmo2", "phi3", "qwen2_moe", "qwen3", "starcoder2"),
)
HOPS = 3
TRIES = 20
ONE_RANK: dict[str, Any] = {
    "saver": "core",
    "ckpt_format": "torch",
    "transformer_impl": "transformer_engine",
    "make_vocab_size_divisible_by": 8,
    "use_distributed_optimizer": False,
    "optimizer": True,
    **dict.fromkeys(("tp", "pp", "vpp", "ep"), 1),
}


def run_journey(number: int, folder: Path) -> None:
    """Run the journey of a number and check each output."""
    random = Random(number)
    config = write_run(folder, random)
    trained = folder / "trained"
    expected = megaconv.fingerprint(trained)
    at, made = trained, []
    for _ in range(TRIES):
        options = {**target(config, random), "optimizer": True}
        if options["saver"] in ("hf", "dcp") or len(made) == HOPS:
            continue  # DCP has the fp32 weights in place of the others
        if options.get("ckpt_format") in ("torch", "torch_dist"):
            options["use_distributed_optimizer"] = random.random() < 0.5
        output = folder / f"at {len(made)}"
        try:
            report = megaconv.convert(at, output, **options)
        except CheckpointError:
            continue
        at = output
        made.append(options)
        assert report.fingerprint == megaconv.fingerprint(output), made
        assert report.fingerprint == expected, made
    check_same_rank(at, trained, folder)


def write_run(folder: Path, random: Random) -> ModelConfig:
    """Write `hf`, and the run `trained`. Models are drawn until Megatron has one with these settings."""
    while True:
        config = write_possible(FAMILIES, folder / "hf", random, ordinary)
        try:
            write_trained(folder / "hf", folder / "trained", dtype=config.dtype)
        except NotExpressible:
            shutil.rmtree(folder / "hf")
        else:
            return config


def check_same_rank(at: Path, trained: Path, folder: Path) -> None:
    """The rank files of two checkpoints on one rank hold the same weights, optimizer, scheduler and progress."""
    files = []
    for source, name in ((at, "back"), (trained, "direct")):
        megaconv.convert(source, folder / name, **ONE_RANK)
        files += (folder / name).glob("*/mp_rank_00/model_optim_rng.pt")
    ours, theirs = map(load, files)
    for part in ("model", "optimizer", "opt_param_scheduler", "iteration"):
        assert leaves(ours[part]) == leaves(theirs[part]), part
    assert ours["args"].consumed_train_samples == theirs["args"].consumed_train_samples


def leaves(value: object, place: str = "") -> dict[str, object]:
    """All that nested containers hold, by place; tensors as their dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return {place: (value.dtype, value.shape, bits(value))}
    inner: dict[Any, Any] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, (list, tuple)):
        inner = dict(enumerate(value))
    else:
        return {place: value}
    found: dict[str, object] = {}
    for key, each in inner.items():
        found |= leaves(each, f"{place}.{key}")
    return found


@pytest.mark.parametrize("number", range(2))
def test_a_run_comes_back_with_its_optimizer(number: int, tmp_path: Path) -> None:
    run_journey(number, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2, 150))
def test_many_runs_come_back_with_their_optimizers(number: int, tmp_path: Path) -> None:
    run_journey(number, tmp_path)
