"""Runs that begin with a model from Hugging Face which Megatron computes otherwise: refused, or told, and gone on with alike."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megaconv
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import NotExpressible
from megaconv.megatron.arguments.latent import LATENT_NORM_EPSILON
from megatron_lite.checkpoint.state import read_arguments, read_common
from tests.trainer.loop.launches import launch, metrics, train
from tests.trainer.parallel.changed_configurations import TOKENS, logits_of_the_trainer
from tests.transformers_oracle import MIXTURES, VOCAB, create, load

pytestmark = pytest.mark.oracle
FINETUNE = (
    f"--mock-data --seq-length 16 --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --global-batch-size 4 --lr 1e-3 --fp32 "
    "--log-interval 1 --eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1"
)
DEEPSEEK = MIXTURES["deepseek_v3"]


def create_deepseek(directory: Path, **settings: object) -> None:
    create(replace(DEEPSEEK, settings={**DEEPSEEK.settings, **settings}), directory)


def test_a_router_that_megatron_does_not_have_is_refused_in_the_words_of_the_converter(
    tmp_path: Path,
) -> None:
    create_deepseek(tmp_path / "hf", num_experts_per_tok=2)
    with pytest.raises(NotExpressible) as refused:
        megaconv.convert(tmp_path / "hf", tmp_path / "core", saver="core")
    running = launch(tmp_path, 1, f"finetune --load hf --train-iters 1 --save run {FINETUNE}")
    assert running.wait() != [0]
    assert str(refused.value) in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_the_converter_says_and_goes_on_with_the_norms_that_it_began_with(
    tmp_path: Path,
) -> None:
    create_deepseek(tmp_path / "hf", rms_norm_eps=1e-2)
    (notice,) = megaconv.convert(tmp_path / "hf", tmp_path / "core", saver="core").notices
    once = train(tmp_path, 1, f"finetune --load hf --train-iters 4 --save whole {FINETUNE}")
    assert notice in once.log(0)
    whole = [line["loss"] for line in metrics(tmp_path)]
    (tmp_path / "metrics.jsonl").unlink()
    train(
        tmp_path, 1, f"finetune --load hf --train-iters 4 --exit-interval 2 --save run {FINETUNE}"
    )
    resumed = train(
        tmp_path, 1, f"finetune --load hf --train-iters 4 --save run --resume {FINETUNE}"
    )
    assert [line["loss"] for line in metrics(tmp_path)] == whole
    assert notice not in resumed.log(0)
    assert open_checkpoint(tmp_path / "run").config.latent.norm_epsilon == 1e-6
    megaconv.convert(tmp_path / "run", tmp_path / "resharded", saver="core", tp=2, ep=2)
    written = {
        name: read_arguments(read_common(tmp_path / name)) for name in ("run", "resharded", "core")
    }
    assert written["run"][LATENT_NORM_EPSILON] == written["resharded"][LATENT_NORM_EPSILON] == 1e-6
    assert LATENT_NORM_EPSILON not in written["core"]


def test_a_checkpoint_of_megatron_is_computed_with_megatrons_one_epsilon(tmp_path: Path) -> None:
    """transformers computes it too, with norms that are told to."""
    create_deepseek(tmp_path / "hf", rms_norm_eps=1e-2)
    megaconv.convert(tmp_path / "hf", tmp_path / "core", saver="core")
    model = load(tmp_path / "hf")
    with torch.no_grad():
        as_transformers = model(input_ids=TOKENS).logits
        for name, module in model.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = 1e-2  # type: ignore[assignment]
        as_megatron = model(input_ids=TOKENS).logits
    found = logits_of_the_trainer(tmp_path / "core")
    assert (found - as_megatron).abs().max() < 2e-5 * as_megatron.abs().max()
    assert (found - as_transformers).abs().max() > 1e-3 * as_megatron.abs().max()
