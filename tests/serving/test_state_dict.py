"""State dicts and models of transformers, from checkpoints that never were converted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.errors import CheckpointError, UsageError
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import run

RUN = FIXTURES / "core-llama-tp2pp2" / "checkpoint"


def rank_state(run_directory: Path, tp_rank: int) -> dict[str, torch.Tensor]:
    """The tensors of a rank file, read by torch itself."""
    (path,) = run_directory.glob(f"*/mp_rank_{tp_rank:02d}/model_optim_rng.pt")
    model = torch.load(path, weights_only=False)["model"]
    return {
        name: value
        for name, value in model.items()
        if isinstance(value, torch.Tensor) and value.numel()
    }


def test_names_of_hugging_face_give_the_tensors_of_a_conversion(tmp_path: Path) -> None:
    run("convert", RUN, tmp_path / "hf", "--saver", "hf")
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    found = megaconv.state_dict(RUN)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(found.slices[name].shape == tensor.shape for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("names", "implementation"), [("core", "transformer_engine"), ("core_local", "local")]
)
def test_names_of_megatron_give_the_tensors_of_rank_files(
    names: str, implementation: str, tmp_path: Path
) -> None:
    target = tmp_path / "core"
    run(
        "convert",
        RUN,
        target,
        "--saver",
        "core",
        "--tp",
        2,
        "--pp",
        1,
        "--transformer-impl",
        implementation,
    )
    for tp_rank in (0, 1):
        expected = rank_state(target, tp_rank)
        found = megaconv.state_dict(RUN, names=names, tp=2, tp_rank=tp_rank)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_shards_of_hugging_face_names_are_the_tensor_together(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", vocab=132)
    whole = load_file(source / "model.safetensors")
    shards = [megaconv.state_dict(source, tp=2, tp_rank=rank) for rank in (0, 1)]
    for name, axis in (("q_proj", 0), ("o_proj", 1), ("down_proj", 1), ("gate_proj", 0)):
        (key,) = (
            each
            for each in whole
            if f"layers.0.self_attn.{name}" in each or f"layers.0.mlp.{name}" in each
        )
        assert torch.equal(torch.cat([shard[key] for shard in shards], axis), whole[key])
    norm = "model.norm.weight"
    assert all(torch.equal(shard[norm], whole[norm]) for shard in shards)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": "meta"}, "names='meta': expected one of hf, core"),
        ({"tp": 2, "tp_rank": 2}, "tp_rank=2: expected 0 to 1 with tp=2"),
        ({"tp_rank": -1}, "tp_rank=-1"),
        ({"tp": 0}, "tp=0: expected 1 or more"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        megaconv.state_dict(RUN, **arguments)


def test_a_size_that_cannot_shard_the_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tensor parallel size"):
        megaconv.state_dict(RUN, tp=3)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gpt_oss",
                "qwen3_next",
                "gemma3_text",
                "deepseek_v3",
                "phi3",
                "nemotron_h",
                "llama4",
            )
        ),
    ],
)
def test_a_checkpoint_of_megatron_is_a_model_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.transformers_oracle import MIXTURES, VARIANTS, create

    create((VARIANTS | MIXTURES)[name], tmp_path / "source")
    outcome = run("convert", tmp_path / "source", tmp_path / "core", "--saver", "core")
    assert outcome.status == 0, outcome.err
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    found = megaconv.load_transformers(tmp_path / "core")
    assert type(found) is type(expected)
    assert not found.training
    assert found.dtype == expected.dtype
    for (key, ours), (other, theirs) in zip(
        found.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert key == other
        assert torch.equal(ours, theirs), key


@pytest.mark.oracle
def test_no_kernel_of_the_hub_is_fetched_for_a_model(tmp_path: Path) -> None:
    """transformers would fetch and run the kernel that a config.json names."""
    source = write_llama(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    named = json.dumps(config | {"_attn_implementation": "somebody/kernel"})
    (source / "config.json").write_text(named)
    assert "/" not in megaconv.load_transformers(source).config._attn_implementation


def test_a_model_can_be_cast(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    model = megaconv.load_transformers(source, dtype="fp32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
