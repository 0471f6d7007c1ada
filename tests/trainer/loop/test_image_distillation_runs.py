"""Runs that learn chats with images from a teacher: the losses and steps of transformers' whole models."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megaconv
from tests.trainer.image_texts import WORD
from tests.trainer.loop.launches import launch, train
from tests.trainer.loop.test_image_pair_runs import QUESTIONS
from tests.trainer.loop.test_image_runs import Example, examples
from tests.trainer.loop.whole_models import (
    STEPS,
    OfTransformers,
    all_figures,
    assert_figures,
    assert_weights,
    figures,
    learn,
    load_whole,
    message,
)
from tests.trainer.multimodal import MODELS, create, token, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = 0.1
ALPHA, TEMPERATURE = 0.6, 2.0
COMMAND = (
    f"finetune --load hf --teacher-load taught/hf --finetune-data data/chats.jsonl --distill-alpha {ALPHA} "
    f"--distill-temperature {TEMPERATURE} --lr {LR} --global-batch-size 1 --seq-length 448 {STEPS}"
)
"""Each step has all chats in its one sample."""
FIGURES = ("loss", "cross_entropy", "divergence")
FAST = (("qwen3_vl", "qwen3_vl"), ("qwen2_5_vl", "exaone4_5"), ("gemma3", "gemma3"))
"""Students and teachers whose runs are not only among the slow tests. The tokens of EXAONE's images have positions as a text."""
OTHERS = (("qwen2_5_vl", "qwen3_vl"), ("qwen3_vl", "glm4v"), ("exaone4_5", "lfm3_vl"))
"""Further teachers of other families."""
ALIKE = tuple((kind, kind) for kind in MODELS if (kind, kind) not in FAST)


def make(student: str, teacher: str, directory: Path) -> None:
    """Write the student, and a teacher with other weights."""
    for kind, place, seed in ((student, directory, 7), (teacher, directory / "taught", 8)):
        create(kind, place / "hf", seed)
        write_chats(place / "data")


def learned_logits(model: Any, example: Example) -> Tensor:
    """[learned tokens, vocabulary]"""
    known = signature(model.forward).parameters
    taken = {name: value for name, value in example.arguments.items() if name in known}
    logits: Tensor = model(**taken).logits[0, :-1]
    return logits[example.labels != -100]


def step(student: Any, teacher: Any, chats: list[tuple[Example, Example]]) -> list[float]:
    """Make a step. Returns FIGURES before it. chats: as the student's and the teacher's own processors write them."""
    labels = torch.cat([own.labels[own.labels != -100] for own, _ in chats])
    logits = torch.cat([learned_logits(student, own) for own, _ in chats])
    with torch.no_grad():
        taught = torch.cat([learned_logits(teacher, theirs) for _, theirs in chats])
    log_p, log_q = ((each / TEMPERATURE).log_softmax(-1) for each in (logits, taught))
    divergence = (log_q.exp() * (log_q - log_p)).sum(-1).mean() * TEMPERATURE**2
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels)
    loss = ALPHA * divergence + (1 - ALPHA) * cross_entropy
    learn(student, loss, LR)
    return [figure.item() for figure in (loss, cross_entropy, divergence)]


def steps_of_transformers(
    student: str, teacher: str, directory: Path, count: int = 2
) -> tuple[list[list[float]], Any]:
    """(FIGURES of each step, the student after them)."""
    places = ((student, directory), (teacher, directory / "taught"))
    model, taught = (load_whole(place) for _, place in places)
    own, theirs = (list(examples(kind, place)) for kind, place in places)
    for one, other in zip(own, theirs, strict=True):
        assert torch.equal(one.arguments["input_ids"], other.arguments["input_ids"])
    chats = list(zip(own, theirs, strict=True))
    return [step(model, taught, chats) for _ in range(count)], model


@pytest.mark.parametrize(("student", "teacher"), FAST)
def test_two_steps_are_those_of_transformers(student: str, teacher: str, tmp_path: Path) -> None:
    """In packed rows, with several images in a chat, and with a chat without an image."""
    make(student, teacher, tmp_path)
    expected, model = steps_of_transformers(student, teacher, tmp_path)
    log = train(tmp_path, 1, COMMAND).log(0)
    assert "the encoder of hf reads the images" in log
    assert "the encoder of taught/hf reads the images" in log
    assert_figures(tmp_path, FIGURES, expected, within=1e-6)
    assert_weights(tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize(("student", "teacher"), [*OTHERS, *ALIKE])
def test_a_step_is_that_of_transformers(student: str, teacher: str, tmp_path: Path) -> None:
    """One step alone: a router may choose another expert behind it, because of a rounding."""
    make(student, teacher, tmp_path)
    expected, model = steps_of_transformers(student, teacher, tmp_path, 1)
    train(tmp_path, 1, COMMAND.replace("--train-iters 2", "--train-iters 1"))
    assert_figures(tmp_path, FIGURES, expected, within=1e-6)
    assert_weights(tmp_path, model)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "--pipeline-model-parallel-size 2"),
        pytest.param(2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow),
        pytest.param(2, "--context-parallel-size 2", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_steps_are_the_same_in_every_layout(size: int, layout: str, tmp_path: Path) -> None:
    """The further vectors of the teacher's encoder are added on the ranks of its own first layers."""
    make("qwen3_vl", "qwen3_vl", tmp_path)
    expected, model = steps_of_transformers("qwen3_vl", "qwen3_vl", tmp_path)
    train(tmp_path, size, f"{COMMAND} {layout}")
    assert_figures(tmp_path, FIGURES, expected, within=1e-6)
    assert_weights(tmp_path, model)


def test_ranks_without_an_image_learn_beside_ranks_with_some(tmp_path: Path) -> None:
    """Two data-parallel ranks, two sequences in a microbatch, several microbatches: the figures of one process."""
    make("qwen3_vl", "qwen3_vl", tmp_path)
    command = COMMAND.replace(
        "--global-batch-size 1 --seq-length 448", "--global-batch-size 8 --seq-length 96"
    )
    command = f"{command} --micro-batch-size 2"
    train(tmp_path, 1, command)
    alone = figures(tmp_path, FIGURES)
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path, 2, f"{command} --use-distributed-optimizer".replace("--save run", "--save two"))
    for one, other in zip(alone, figures(tmp_path, FIGURES), strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_a_run_continues_and_evaluates_with_the_same_teacher(tmp_path: Path) -> None:
    """Adapters of a language model learn, whose images the encoder of another directory reads."""
    make("qwen2_5_vl", "qwen2_5_vl", tmp_path)
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    student = "--load text --image-encoder hf --lora-rank 4"
    valid = "--valid-finetune-data data/chats.jsonl --eval-interval 1"
    command = COMMAND.replace("--load hf", f"{student} {valid}")
    log = train(tmp_path, 1, command).log(0)
    assert "validation loss" in log
    whole = all_figures(tmp_path, FIGURES)
    (tmp_path / "metrics.jsonl").unlink()
    again = command.replace("--save run", "--save again")
    train(tmp_path, 1, f"{again} --exit-interval 1")
    log = train(tmp_path, 1, f"{again} --resume").log(0)
    assert "continuing after step 1" in log
    assert all_figures(tmp_path, FIGURES) == whole
    adapters = [
        (tmp_path / run / "iter_0000002" / "adapter_model.safetensors").read_bytes()
        for run in ("run", "again")
    ]
    assert adapters[0] == adapters[1]


def step_on_completions(directory: Path) -> tuple[float, Any]:
    """(the divergence of the student's likeliest completions, the student after one step)."""
    student = OfTransformers("qwen2_5_vl", directory)
    teacher = OfTransformers("qwen3_vl", directory / "taught")
    apart = []
    for question, names in QUESTIONS:
        completion = student.completion(question, names, 5)
        assert token(WORD) not in completion
        log_p = student.logits(question, names, completion).log_softmax(-1)
        with torch.no_grad():
            log_q = teacher.logits(question, names, completion).log_softmax(-1)
        apart.append((log_p.exp() * (log_p - log_q)).sum(-1))
    loss = torch.cat(apart).mean()
    student.learn(loss, LR)
    return loss.item(), student.model


ON_POLICY = "--distill-on-policy --distill-beta 1 --max-completion-length 5"
PROMPTS = (
    COMMAND.replace("chats.jsonl", "prompts.jsonl")
    .replace("--global-batch-size 1 --seq-length 448", "--global-batch-size 4")
    .replace(f"--distill-alpha {ALPHA} --distill-temperature {TEMPERATURE}", ON_POLICY)
)


def write_prompts(directory: Path) -> None:
    lines = [
        json.dumps({"prompt": [message("user", question)], "images": list(names)})
        for question, names in QUESTIONS
    ]
    (directory / "data" / "prompts.jsonl").write_text("\n".join(lines))


def test_a_step_on_own_completions_is_that_of_transformers(tmp_path: Path) -> None:
    """At a temperature of nearly 0, where they are the likeliest ones."""
    make("qwen2_5_vl", "qwen3_vl", tmp_path)
    write_prompts(tmp_path)
    expected, model = step_on_completions(tmp_path)
    command = PROMPTS.replace("--train-iters 2", "--train-iters 1")
    train(tmp_path, 1, f"{command} --temperature 1e-4")
    ((loss, _, divergence),) = figures(tmp_path, FIGURES)
    assert loss == divergence == pytest.approx(expected, rel=1e-5)
    assert_weights(tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer",
    ],
)
def test_own_completions_are_the_same_in_every_layout(layout: str, tmp_path: Path) -> None:
    """Also in an evaluation."""
    make("qwen3_vl", "qwen3_vl", tmp_path)
    write_prompts(tmp_path)
    valid = "--valid-finetune-data data/prompts.jsonl --eval-interval 1 --eval-iters 1"
    found = []
    for size, more in ((1, ""), (2, layout)):
        train(
            tmp_path, size, f"{PROMPTS} {valid} {more} --save run{size} --metrics-file {size}.jsonl"
        )
        lines = (tmp_path / f"{size}.jsonl").read_text().splitlines()
        found.append(
            [
                value
                for line in map(json.loads, lines)
                for name, value in line.items()
                if name.endswith(FIGURES)
            ]
        )
    assert len(found[0]) == 2 * 6
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a file of JSON."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def of_texts(directory: Path) -> None:
    megaconv.convert(directory / "taught/hf", directory / "text", saver="hf", text_only=True)
    (directory / "taught/hf").rename(directory / "whole")
    (directory / "text").rename(directory / "taught/hf")


def with_fewer_tokens(directory: Path) -> None:
    edit(
        directory / "taught/hf/preprocessor_config.json",
        size={"shortest_edge": 64, "longest_edge": 512},
    )


def with_another_token(directory: Path) -> None:
    edit(directory / "taught/hf/config.json", image_token_id=token("<|video_pad|>"))


def as_it_is(directory: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("kinds", "change", "words"),
    [
        (("qwen3_vl", "qwen3_vl"), of_texts, "--teacher-load taught/hf: is no directory of a multimodal model, and --finetune-data has"),
        (("qwen3_vl", "qwen3_vl"), with_fewer_tokens, "--teacher-load taught/hf: makes 6 tokens of an image of 56 x 40 pixels, and hf 35;"),
        (("qwen3_vl", "qwen3_vl"), with_another_token, "--teacher-load taught/hf: its token of images is "),
        (("exaone4_5", "qwen2_5_vl"), as_it_is, "--teacher-load taught/hf: its images have positions of frame, row and column"),
        (("gemma3", "llava"), as_it_is, "--teacher-load taught/hf: writes other tokens around the parts of an image than hf;"),
    ],
)  # fmt: skip
def test_a_teacher_that_reads_other_tokens_is_refused_in_one_line(
    kinds: tuple[str, str], change: Any, words: str, tmp_path: Path
) -> None:
    make(*kinds, tmp_path)
    change(tmp_path)
    running = launch(tmp_path, 1, COMMAND)
    assert running.wait() == [2]
    assert words in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()


def as_megatron_core(directory: Path) -> tuple[str, str]:
    megaconv.convert(
        directory / "taught/hf", directory / "taught/core", saver="core", tp=2, text_only=True
    )
    return "taught/core", "taught/hf"


def as_best_of_a_run(directory: Path) -> tuple[str, str]:
    chats = "--finetune-data data/chats.jsonl --valid-finetune-data data/chats.jsonl"
    steps = "--train-iters 2 --fp32 --eval-interval 1 --keep-best --global-batch-size 2 --seq-length 448"
    train(directory, 1, f"finetune --load taught/hf {chats} {steps} --lr 1e-3 --save tuned")
    megaconv.convert(
        directory / "tuned/best", directory / "whole", saver="hf", base=directory / "taught/hf", optimizer=False
    )  # fmt: skip
    return "tuned/best", "whole"


@pytest.mark.parametrize("written", [as_megatron_core, as_best_of_a_run])
def test_a_teacher_in_megatrons_files_has_the_encoder_of_a_directory(
    written: Any, tmp_path: Path
) -> None:
    """It teaches as the same model in Hugging Face's files does."""
    make("qwen3_vl", "qwen3_vl", tmp_path)
    language_model, whole = written(tmp_path)
    found = []
    for number, words in enumerate(
        (f"--teacher-load {whole}", f"--teacher-load {language_model} --teacher-image-encoder taught/hf")
    ):  # fmt: skip
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        command = COMMAND.replace("--teacher-load taught/hf", words)
        log = train(tmp_path, 1, command.replace("--save run", f"--save run{number}")).log(0)
        found.append(figures(tmp_path, FIGURES))
    assert "the encoder of taught/hf reads the images" in log
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("encoder", "words"),
    [
        ("data", "--teacher-image-encoder data: is no multimodal model"),
        ("wide", "--teacher-image-encoder wide: its language model has a hidden size of 64, and the teacher one of 32"),
    ],
)  # fmt: skip
def test_an_encoder_that_isnt_the_teachers_is_refused(
    encoder: str, words: str, tmp_path: Path
) -> None:
    make("qwen3_vl", "qwen3_vl", tmp_path)
    (tmp_path / "wide").symlink_to("taught/hf")
    wide = tmp_path / "wide"
    if encoder == "wide":
        of_texts(tmp_path)
        wide.unlink()
        (tmp_path / "whole").rename(wide)
        config = json.loads((wide / "config.json").read_text())
        config["text_config"]["hidden_size"] = config["vision_config"]["out_hidden_size"] = 64
        edit(wide / "config.json", **config)
    running = launch(tmp_path, 1, f"{COMMAND} --teacher-image-encoder {encoder}")
    assert running.wait() == [2]
    assert words in running.log(0)
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_texts_teaches_a_multimodal_model_texts(tmp_path: Path) -> None:
    make("qwen3_vl", "qwen3_vl", tmp_path)
    of_texts(tmp_path)
    chat = {"messages": [message("user", "no image"), message("assistant", "none")]}
    write_chats(tmp_path / "data", [chat])
    train(tmp_path, 1, COMMAND)
    (first, second) = figures(tmp_path, FIGURES)
    assert second[2] < first[2]
