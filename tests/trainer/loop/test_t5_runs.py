"""A T5 from sentences to Megatron core: it trains at any layout, goes on to the same bits, is read by core and taken up again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import megaconv
from formats import torch_zip
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.loop.tokenizer import make_tokenizer
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.masked import MaskedSpans
from megatron_lite.objectives.training_data import Setup
from megatron_lite.parallel.grid import make_grid
from megatron_lite.processes.launch import Place
from megatron_lite.settings.architecture import model_from_flags
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import work_out
from tests.megatron_oracle import Megatron
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_manners import refused

ROOT = Path(__file__).parents[3]
MASKED = Path(__file__).parents[1] / "fixtures" / "masked"
WORDS = 129
"""The number of words that are no sentinels."""
DATA = (
    f"--data-path {MASKED}/corpus_text_sentence --vocab-file vocab.txt --vocab-extra-ids 40 --split 80,15,5 "
    "--encoder-seq-length 64 --decoder-seq-length 32 --global-batch-size 4 --log-interval 1 --eval-iters 0 "
    "--metrics-file metrics.jsonl --distributed-timeout-minutes 1 --lr 1e-3"
)
T5 = (
    "--model-type t5 --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --no-bias-gelu-fusion "
    f"--max-position-embeddings 64 --transformer-impl local {DATA}"
)
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
STAGES = "--pp 2 --pipeline-model-parallel-split-rank 1"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    words = (MASKED / "vocab.txt").read_text().splitlines()[:WORDS]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return tmp_path


def figures(directory: Path) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in metrics(directory)]


@pytest.mark.slow
def test_a_t5_with_stages_goes_on_to_the_same_bits(place: Path) -> None:
    """The run has dropout."""
    train(place, 2, f"pretrain {T5} {STAGES} --train-iters 4 --save straight")
    straight = figures(place)
    (place / "metrics.jsonl").unlink()
    train(place, 2, f"pretrain {T5} {STAGES} --train-iters 4 --save parted --exit-interval 2")
    train(place, 2, f"pretrain {T5} {STAGES} --train-iters 4 --save parted --resume")
    assert figures(place) == straight
    found, expected = (megaconv.fingerprint(place / name) for name in ("parted", "straight"))
    assert found == expected
    # Megatron's T5 has one stage.
    args = torch_zip.read(place / "parted" / "iter_0000004" / "common.pt")["args"]
    assert (
        args.pipeline_model_parallel_size,
        args.encoder_num_layers,
        args.decoder_num_layers,
    ) == (1, 2, 2)
    assert (args.encoder_seq_length, args.decoder_seq_length) == (64, 32)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--tp 2 --sequence-parallel", "--use-distributed-optimizer"])
def test_a_t5_goes_on_to_the_same_bits_at_any_layout(words: str, place: Path) -> None:
    train(place, 2, f"pretrain {T5} {words} --train-iters 4 --save straight")
    straight = figures(place)
    (place / "metrics.jsonl").unlink()
    train(place, 2, f"pretrain {T5} {words} --train-iters 4 --save parted --exit-interval 2")
    train(place, 2, f"pretrain {T5} {words} --train-iters 4 --save parted --resume")
    assert figures(place) == straight


def own_logits(checkpoint: Path, source: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    opened = megaconv.open(checkpoint)
    layout = Layout(stage_layers=(opened.config.layer_count,))
    engine = Engine(
        opened.config, make_grid(layout, 1, torch.device("cpu")), ModelOptions("float32"), None
    )
    load_weights(engine, opened.tensors)
    found = engine.logits(Microbatch(tokens, tokens, source=source))
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.oracle
def test_megatron_core_computes_the_same_from_what_a_t5_saved_and_it_is_taken_up_again(
    place: Path,
) -> None:
    """Core loads strictly. Saved by two stages without any, and by one process with rank files."""
    train(place, 1, f"pretrain {T5} {PLAIN} --train-iters 2 --save one --ckpt-format torch")
    alone = figures(place)
    (place / "metrics.jsonl").unlink()
    train(place, 2, f"pretrain {T5} {PLAIN} {STAGES} --train-iters 2 --save two --no-save-optim")
    assert np.array(figures(place)) == pytest.approx(np.array(alone), rel=1e-5)
    opened = megaconv.open(place / "two")
    assert (opened.config.family, opened.config.encoder.layers, opened.config.norm.final) == (
        "t5",
        2,
        False,
    )
    generator = torch.Generator().manual_seed(1)
    source, tokens = (
        torch.randint(opened.config.vocab, (2, length), generator=generator) for length in (16, 12)
    )
    (place / "megatron").mkdir()
    with Megatron(place / "megatron") as megatron:
        for name in ("one", "two"):
            found = megatron.answer(
                place / name, {"input_ids": source, "decoder_input_ids": tokens}
            ).float()
            expected = own_logits(place / name, source, tokens)
            assert (found[..., : expected.shape[-1]] - expected).abs().max().item() < 1e-5, name

    megaconv.convert(
        place / "two",
        place / "ranks",
        saver="core",
        tp=2,
        ckpt_format="torch",
        transformer_impl="local",
    )
    (place / "metrics.jsonl").unlink()
    for name in ("ranks", "one"):
        train(
            place,
            1,
            f"finetune --load {name} {DATA} {PLAIN} --transformer-impl local --train-iters 1",
        )
    first, second = figures(place)
    assert first == pytest.approx(second, rel=1e-5)


MODERN = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("words", [MODERN, "--position-embedding-type rope"])
def test_megatron_core_computes_the_same_t5_of_newer_parts(words: str, place: Path) -> None:
    """Rope in its decoder and encoder, not between them; wide steps, so that the weights aren't those of the start."""
    train(
        place,
        1,
        f"pretrain {T5} {PLAIN} {words} --lr 1e-2 --train-iters 4 --save one --ckpt-format torch",
    )
    vocab = megaconv.open(place / "one").config.vocab
    generator = torch.Generator().manual_seed(1)
    source, tokens = (torch.randint(vocab, (2, length), generator=generator) for length in (16, 12))
    expected = own_logits(place / "one", source, tokens)
    (place / "megatron").mkdir()
    with Megatron(place / "megatron") as megatron:
        found = megatron.answer(
            place / "one", {"input_ids": source, "decoder_input_ids": tokens}
        ).float()
    assert (
        found[..., : expected.shape[-1]] - expected
    ).abs().max().item() < 1e-5 * expected.abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [STAGES, "--tp 2 --sequence-parallel --use-distributed-optimizer --transformer-impl local"],
)
def test_megatron_core_loads_weights_and_optimizer_strictly(words: str, place: Path) -> None:
    """Core loads the trainer's checkpoint, and megaconv's conversion of it."""
    rate = "--lr-warmup-iters 0 --lr-decay-iters 7"
    train(place, 2, f"pretrain {T5} {words} {rate} --train-iters 3 --save ckpt --bf16")
    megaconv.convert(
        place / "ckpt",
        place / "again",
        saver="core",
        ckpt_format="torch_dist",
        transformer_impl="local",
    )
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
    }
    for name in ("ckpt", "again"):
        version, meeting = place / name / "iter_0000003", place / f"meeting of {name}"
        command = [
            sys.executable,
            "-m",
            "tests.trainer.loop.core_load",
            str(version),
            "1",
            str(meeting),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "tensors and their optimizer state" in done.stdout


def test_a_t5_run_refuses_unusable_settings_before_its_first_step(place: Path) -> None:
    command = f"pretrain {T5} --train-iters 1"
    few = refused(place, command.replace("--vocab-extra-ids 40", "--vocab-extra-ids 0"))
    assert few.startswith(
        "the tokenizer has no <extra_id_0>, which stands for a run of hidden words; take"
    )


def test_a_run_draws_megatrons_samples(place: Path) -> None:
    """The flags alone give the samples that Megatron's own datasets made (fixtures/masked)."""
    settings, _ = parse(
        "pretrain", f"{T5} --train-iters 1".replace("vocab.txt", f"{place}/vocab.txt").split()
    )
    tokenizer = make_tokenizer(settings, None, MaskedSpans().extra_ids(settings))
    config = model_from_flags(settings, tokenizer.vocab_size)
    sizes = work_out(settings, config, ModelOptions(), 1)
    info, expected = (
        json.loads((MASKED / "info.json").read_text()),
        np.load(MASKED / "expected.npz"),
    )
    place = Place(0, 1, torch.device("cpu"), None, None)
    data = MaskedSpans().read(settings, tokenizer)
    datasets = data.datasets(Setup(settings, config, tokenizer, sizes, place), info["num_samples"])
    assert [len(dataset or ()) for dataset in datasets] == info["cases"]["t5"]["lengths"]
    for part, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        assert dataset is not None
        for number in range(len(expected[f"t5/{part}/truncated"])):
            for name, found in dataset[number]._asdict().items():
                assert np.array_equal(found, expected[f"t5/{part}/{name}"][number]), (
                    f"{part} {number}: {name}"
                )
