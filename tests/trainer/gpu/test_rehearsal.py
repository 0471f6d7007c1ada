"""Each test of test_gpu.py runs on a CPU in place of the GPU, so that no mistake in it waits for the next GPU."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.gpu import test_gpu

FIRST: dict[str, dict[str, Any]] = {
    "test_a_gpu_trains_as_a_cpu_does": {"model": "deepseek_v32"},
    "test_compiled_layers_train_as_others_do": {"model": "gpt2"},
    "test_each_option_trains_as_on_a_cpu": {"option": "experts, padded, with adapters"},
    "test_random_numbers_are_the_same_in_a_second_run": {"option": "lora"},
    "test_offloaded_activations_come_back": {"model": "qwen3"},
    "test_generated_tokens_are_those_of_a_cpu": {"model": "gpt2"},
    "test_preferences_are_learned_as_on_a_cpu": {},
    "test_a_reward_model_learns_as_on_a_cpu": {"model": "gpt2"},
    "test_drafts_and_answers_are_those_of_a_cpu": {"model": "mimo"},
    "test_a_command_learns_what_it_learns_on_a_cpu": {"objective": "hidden words"},
    "test_a_command_learns_from_images_as_on_a_cpu": {"kind": "qwen3_vl"},
    "test_a_command_learns_from_pairs_with_images_as_on_a_cpu": {"kind": "qwen3_vl"},
    "test_a_command_learns_from_rated_answers_with_images_as_on_a_cpu": {},
    "test_a_command_learns_images_from_a_teacher_as_on_a_cpu": {},
    "test_a_prompt_with_images_has_the_logits_of_a_cpu": {"kind": "qwen3_vl"},
    "test_muon_on_a_gpu_trains_as_on_a_cpu": {},
    "test_each_kernel_of_attention_agrees_with_plain_products": {"model": "qwen3", "backend": "auto"},
    "test_products_in_fp8_learn_almost_as_those_in_bf16": {"recipe": "delayed", "engine": False},
    "test_the_grouped_product_of_experts_is_that_of_one_after_the_other": {},
    "test_deterministic_runs_give_the_same_bits_and_one_that_saves_meanwhile_saves_those_of_its_step": {},
    "test_ranks_on_nccl_train_as_on_gloo": {"name": "context, ring"},
    "test_installed_kernels_of_mixers_with_a_state_train_as_a_cpu_does": {"model": "mamba"},
}  # fmt: skip
"""One set of parameters of each test."""
SLOW = {
    "test_deterministic_runs_give_the_same_bits_and_one_that_saves_meanwhile_saves_those_of_its_step",
}


def _tests() -> dict[str, Callable[..., None]]:
    return {
        name: function
        for name, function in vars(test_gpu).items()
        if name.startswith("test_") and inspect.isfunction(function)
    }


@pytest.fixture
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_gpu, "GPU", torch.device("cpu"))
    monkeypatch.setattr(test_gpu, "NCCL", "gloo")
    monkeypatch.setattr(test_gpu, "installed", lambda _: True)
    with torch.compiler.set_stance("force_eager"):
        yield


def test_each_test_is_rehearsed() -> None:
    assert set(FIRST) == set(_tests())


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FIRST],
)
def test_a_test_runs_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = _tests()[name]
    fixtures = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = inspect.signature(function).parameters
    function(**FIRST[name], **{word: made for word, made in fixtures.items() if word in wanted})
