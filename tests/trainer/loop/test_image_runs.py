"""Runs on chats with images: the same losses and gradients as transformers' whole model, and the way back into its files."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import megaconv
from tests.trainer.image_texts import WORD, shown
from tests.trainer.loop.launches import launch, metrics, train
from tests.trainer.loop.whole_models import assert_weights, learn, load_whole
from tests.trainer.multimodal import MODELS, PLACEHOLDERS, chats, create, token, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = 0.1
STEP = (
    f"--train-iters 1 --global-batch-size 1 --seq-length 448 --fp32 --optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 "
    f"--lr {LR} --lr-decay-style constant --lr-warmup-iters 0 --log-interval 1 --metrics-file metrics.jsonl "
    "--distributed-timeout-minutes 1 --save run"
)
"""One step, with all chats in its one sample. The weights change by the gradients."""
IMAGES = (("0.png",), ("1.png", "2.png"), (), ("3.png",))
"""The images of the chats."""


@dataclass(frozen=True)
class Example:
    """A chat as transformers takes it."""

    arguments: dict[str, Any]
    labels: torch.Tensor


def examples(kind: str, directory: Path) -> Iterator[Example]:
    """The chats by transformers' own template, tokenizer and image processor."""
    import transformers
    from PIL import Image

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "hf")
    processor = transformers.AutoImageProcessor.from_pretrained(directory / "hf")
    for chat, names in zip(chats(), IMAGES, strict=True):
        text = tokenizer.apply_chat_template(_plain(chat["messages"]), tokenize=False)
        arguments: dict[str, Any] = {}
        if names:
            images = [Image.open(directory / "data" / name) for name in names]
            arguments, written = shown(kind, images, processor, transformers)
            first, *others = text.split(PLACEHOLDERS.get(kind, WORD))
            text = first + "".join(map("".join, zip(written, others, strict=True)))
        start = text.index("assistant\n") + len("assistant\n")
        end = text.index("<|im_end|>", start) + len("<|im_end|>")
        made = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = torch.tensor(made["input_ids"])
        learned = torch.tensor([start <= first < end for first, _ in made["offset_mapping"]])
        arguments["input_ids"] = ids[None]
        arguments["mm_token_type_ids"] = (ids[None] == token(WORD)).int()
        arguments["token_type_ids"] = arguments["mm_token_type_ids"]
        yield Example(arguments, ids.masked_fill(~learned, -100)[1:])


def _plain(messages: list[Any]) -> list[Any]:
    """The messages with images as the template expects them."""
    asked, answer = messages
    content = asked["content"]
    if isinstance(content, str) and "<image>" in content:
        content = [{"type": "image"}, {"type": "text", "text": content.removeprefix("<image>")}]
    elif not isinstance(content, str):
        content = [part if "text" in part else {"type": "image"} for part in content]
    return [{**asked, "content": content}, answer]


def step_of_transformers(kind: str, directory: Path) -> tuple[float, Any]:
    """(loss, the model after one step)."""
    model = load_whole(directory)
    known = signature(model.forward).parameters
    total, count = torch.zeros(()), 0
    for example in examples(kind, directory):
        taken = {name: value for name, value in example.arguments.items() if name in known}
        logits = model(**taken).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, example.labels, reduction="sum")
        count += int((example.labels != -100).sum())
    loss = total / count
    learn(model, loss, LR)
    return loss.item(), model


def make(kind: str, directory: Path) -> Path:
    create(kind, directory / "hf")
    return write_chats(directory / "data")


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """In packed rows, with several images in a chat, and with a chat without an image."""
    make(kind, tmp_path)
    expected, model = step_of_transformers(kind, tmp_path)
    running = train(tmp_path, 1, f"finetune --load hf --finetune-data data/chats.jsonl {STEP}")
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert "reads the images" in running.log(0)
    assert "Loading weights" not in running.log(0)
    assert re.search(r"4 examples, 4 images of .*\d tokens, ", running.log(0))
    assert_weights(tmp_path, model)


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2"
LAID_OUT = (
    *("qwen3_vl", "internvl", "gemma3", "gemma4_small", "gemma4_unified"),
    *("aya_vision", "llava_onevision", "ovis2", "minicpmv4_6"),
)
QUICK = {
    ("qwen3_vl", TENSOR),
    ("qwen3_vl", PIPELINE),
    ("qwen3_vl", CONTEXT),
    ("internvl", PIPELINE),
    ("gemma3", CONTEXT),
    ("gemma4_small", TENSOR),
    ("gemma4_small", PIPELINE),
}
"""Kinds and layouts of `make test`: each layout with two kinds or more. The other ones are slow."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in QUICK else [pytest.mark.slow])
        for kind in LAID_OUT
        for layout in (TENSOR, PIPELINE, CONTEXT)
    ],
)
def test_a_step_is_the_same_in_every_layout(kind: str, layout: str, tmp_path: Path) -> None:
    """The further vectors of Qwen3-VL's encoder are added on the ranks of the first layers."""
    make(kind, tmp_path)
    expected, model = step_of_transformers(kind, tmp_path)
    train(tmp_path, 2, f"finetune --load hf --finetune-data data/chats.jsonl {layout} {STEP}")
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert_weights(tmp_path, model)


def losses(directory: Path) -> list[tuple[float | None, float | None]]:
    """(loss, loss of the evaluation) of each line of the metrics."""
    return [(line.get("loss"), line.get("validation_loss")) for line in metrics(directory)]


def test_a_run_continues_and_evaluates_on_images(tmp_path: Path) -> None:
    make("qwen2_5_vl", tmp_path)
    data = (
        "--finetune-data data/chats.jsonl --valid-finetune-data data/chats.jsonl --eval-interval 2"
    )
    flags = f"finetune --load hf {data} {STEP}".replace("--train-iters 1", "--train-iters 4")
    train(tmp_path, 1, flags)
    whole = losses(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    again = flags.replace("--save run", "--save stopped")
    train(tmp_path, 1, f"{again} --exit-interval 2")
    train(tmp_path, 1, f"{again} --resume")
    assert losses(tmp_path) == whole
    # A run of the language model alone goes on with the encoder of the original.
    once_more = STEP.replace("--save run", "--save further")
    data = "--finetune-data data/chats.jsonl --image-encoder hf"
    log = train(tmp_path, 1, f"finetune --load run {data} {once_more}").log(0)
    assert "the encoder of hf reads the images" in log


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_vl", "internvl", "mistral3", "gemma3", "gemma4", "smolvlm"),
        pytest.param("gemma4_unified", marks=pytest.mark.slow),
        pytest.param("cohere2_vision", marks=pytest.mark.slow),
        pytest.param("qianfan_ocr", marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_from_images_and_are_merged_into_the_whole_model(
    kind: str, tmp_path: Path
) -> None:
    make(kind, tmp_path)
    log = train(
        tmp_path,
        1,
        f"finetune --load hf --finetune-data data/chats.jsonl --lora-rank 4 --guide {STEP}",
    ).log(0)
    assert "megaconv merge hf run" in log
    megaconv.merge(tmp_path / "hf", tmp_path / "run", tmp_path / "merged")
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    megaconv.merge(tmp_path / "text", tmp_path / "run", tmp_path / "merged-text")
    megaconv.convert(
        tmp_path / "merged-text", tmp_path / "back", saver="hf", base=tmp_path / "hf"
    )  # fmt: skip
    merged, back = (megaconv.fingerprint(tmp_path / name) for name in ("merged", "back"))
    assert merged == back != megaconv.fingerprint(tmp_path / "hf")
    assert_modules_exist(tmp_path)
    log = train(
        tmp_path, 1,
        f"finetune --load hf --finetune-data data/chats.jsonl --lora-rank 4 --resume {STEP}".replace("--train-iters 1", "--train-iters 2"),
    ).log(0)  # fmt: skip
    assert "continuing after step 1" in log


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_a_tied_embedding_beside_adapters_is_merged_into_the_whole_model(
    kind: str, tmp_path: Path
) -> None:
    """The adapter has it under the name of the head too, which the model's files lack."""
    make(kind, tmp_path)
    tie(tmp_path)
    flags = "--lora-rank 4 --lora-modules-to-save embed_tokens"
    train(tmp_path, 1, f"finetune --load hf --finetune-data data/chats.jsonl {flags} {STEP}")
    megaconv.merge(tmp_path / "hf", tmp_path / "run", tmp_path / "merged")
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    megaconv.merge(tmp_path / "text", tmp_path / "run", tmp_path / "merged-text")
    megaconv.convert(
        tmp_path / "merged-text", tmp_path / "back", saver="hf", base=tmp_path / "hf"
    )  # fmt: skip
    merged, back = (megaconv.fingerprint(tmp_path / name) for name in ("merged", "back"))
    assert merged == back != megaconv.fingerprint(tmp_path / "hf")


def tie(directory: Path) -> None:
    """Tie the head of the model to its embedding."""
    without(directory, "lm_head")
    path = directory / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))


def assert_modules_exist(directory: Path) -> None:
    """The adapters have the names of modules of transformers' whole model, and its encoder has none of the targets."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(directory / "hf")
    modules = {name for name, _ in model.named_modules()}
    version = directory / "run" / "iter_0000001"
    with safe_open(version / "adapter_model.safetensors", "pt") as file:
        adapted = {
            name.removeprefix("base_model.model.").partition(".lora_")[0]
            for name in file.keys()  # noqa: SIM118
        }
    assert adapted < modules
    targets = json.loads((version / "adapter_config.json").read_text())["target_modules"]
    assert {name for name in modules if re.fullmatch(targets, name)} == adapted


def without(directory: Path, part: str) -> None:
    """Take the tensors of a part out of the model's files."""
    path = directory / "hf" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if part not in name}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("part", ["visual.blocks.0.", "visual."])
def test_an_encoder_without_its_weights_is_refused(part: str, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    make("qwen2_5_vl", tmp_path)
    without(tmp_path, part)
    running = launch(tmp_path, 1, f"finetune --load hf --finetune-data data/chats.jsonl {STEP}")
    assert running.wait() == [3]
    assert "of the encoder, such as model.visual.blocks.0." in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()


def test_an_encoder_of_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    make("qwen2_5_vl", tmp_path)
    make("llava", tmp_path / "other")
    path = tmp_path / "other" / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["hidden_size"] = 64
    path.write_text(json.dumps(config))
    data = "--finetune-data data/chats.jsonl --image-encoder other/hf"
    running = launch(tmp_path, 1, f"finetune --load hf {data} {STEP}")
    assert running.wait() == [2]
    assert "has a hidden size of 64, and the trained model one of 32" in running.log(0)
    assert "Traceback" not in running.log(0)


def test_a_config_of_an_older_transformers_is_read(tmp_path: Path) -> None:
    """The files of Qwen2-VL on the Hub have the language model's settings at the top, and rope_scaling."""
    make("qwen2_vl", tmp_path)
    expected, _ = step_of_transformers("qwen2_vl", tmp_path)
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps({**text, **config, "model_type": "qwen2_vl"}))
    train(tmp_path, 1, f"finetune --load hf --finetune-data data/chats.jsonl {STEP}")
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_ranks_without_an_image_train_beside_ranks_with_some(tmp_path: Path) -> None:
    """Two data-parallel ranks, two sequences in a microbatch, several microbatches: the losses of one process."""
    make("qwen3_vl", tmp_path)
    flags = STEP.replace(
        "--global-batch-size 1 --seq-length 448", "--global-batch-size 8 --seq-length 96"
    )
    flags = f"finetune --load hf --finetune-data data/chats.jsonl {flags} --micro-batch-size 2"
    train(tmp_path, 1, flags)
    alone = metrics(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path, 2, f"{flags} --use-distributed-optimizer".replace("--save run", "--save two"))
    for name in ("loss", "grad_norm"):
        assert metrics(tmp_path)[0][name] == pytest.approx(alone[0][name], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message", "status"),
    [
        ("--finetune-data data/gone.jsonl", "there is no such image; paths are relative", 3),
        ("--finetune-data data/chats.jsonl --image-encoder data", "data: is no multimodal model", 2),
        ("--mock-data --image-encoder hf", "--image-encoder requires --finetune-data", 2),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(
    flags: str, message: str, status: int, tmp_path: Path
) -> None:
    make("llava", tmp_path)
    write_chats(tmp_path / "data")
    record = {**chats()[3], "images": ["gone.png"]}
    (tmp_path / "data" / "gone.jsonl").write_text(json.dumps(record))
    running = launch(tmp_path, 1, f"finetune --load hf {flags} {STEP}")
    assert running.wait() == [status]
    assert message in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()
