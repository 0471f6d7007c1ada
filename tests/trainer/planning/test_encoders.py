"""The encoder of a run on images is planned as the run loads it: its size, and the stages that have it."""

import gc
import shutil
from pathlib import Path

import pytest
import torch

from megatron_lite.objectives.image_encoder import ImageEncoder
from megatron_lite.planning.command import main
from megatron_lite.planning.encoders import encoder_of
from tests.trainer.multimodal import MODELS, create
from tests.trainer.planning.recorded import tensor_bytes
from tests.trainer.planning.test_command import planned

QUICK = {"qwen2_5_vl", "qwen3_vl", "internvl", "mistral3"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in MODELS],
)
def test_its_parameters_are_those_that_a_run_loads(kind: str, tmp_path: Path) -> None:
    create(kind, tmp_path)
    loaded = ImageEncoder(tmp_path, torch.device("cpu"), torch.bfloat16)
    planned_one = encoder_of(tmp_path)
    assert planned_one is not None
    assert planned_one.parameters == loaded.parameters


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose encoder adds to the output of its first layer."""
    directory = tmp_path_factory.mktemp("model")
    create("qwen3_vl", directory)
    return directory


SIZES = "--seq-length 64 --global-batch-size 4 --world-size 2"


def test_the_memory_is_that_of_the_tensors_that_are_alive(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stage,) = planned(capsys, f"{qwen} chats.jsonl {SIZES}")["stages"]
    gc.collect()
    before = tensor_bytes()
    loaded = ImageEncoder(qwen, torch.device("cpu"), torch.bfloat16)
    gc.collect()
    assert tensor_bytes() - before == pytest.approx(stage["encoder_bytes"], rel=0.01)
    del loaded


def test_the_stages_of_images_have_it_and_texts_need_none(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = f"{SIZES} --pp 2"
    first, second = planned(capsys, f"{qwen} chats.jsonl {both}")["stages"]
    texts, _ = planned(capsys, f"--load {qwen} --mock-data --train-iters 2 {both}")["stages"]
    assert first["encoder_bytes"] > 0
    assert second["encoder_bytes"] == texts["encoder_bytes"] == 0
    assert first["bytes"] == texts["bytes"] + first["encoder_bytes"]
    assert main(f"{qwen} chats.jsonl {both}".split()) == 0
    assert "for the encoder of images, which a run on texts alone" in capsys.readouterr().out


def test_a_teacher_has_one_of_its_own(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone,) = planned(capsys, f"{qwen} chats.jsonl {SIZES}")["stages"]
    (taught,) = planned(capsys, f"{qwen} chats.jsonl --teacher-load {qwen} {SIZES}")["stages"]
    assert taught["encoder_bytes"] == 2 * alone["encoder_bytes"]


def test_a_language_model_alone_has_that_of_the_flag(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole,) = planned(capsys, f"{qwen} chats.jsonl {SIZES}")["stages"]
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 300"
    words = f"{flags} --finetune-data chats.jsonl --epochs 1 --image-encoder {qwen} {SIZES}"
    (named,) = planned(capsys, words)["stages"]
    assert named["encoder_bytes"] == whole["encoder_bytes"]


def test_a_config_alone_does_not_tell_its_size(
    qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(qwen, tmp_path / "sizes", ignore=shutil.ignore_patterns("*.safetensors"))
    words = f"{tmp_path / 'sizes'} chats.jsonl {SIZES}"
    (stage,) = planned(capsys, words)["stages"]
    assert stage["encoder_bytes"] == 0
    assert main(words.split()) == 0
    said = f"the encoder of images is left out: {tmp_path / 'sizes'} has no files of weights"
    assert said in capsys.readouterr().out
