"""transformers' whole multimodal models: log-probabilities of answers to questions with images, and steps of their language model."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from tests.trainer.image_texts import WORD, shown
from tests.trainer.loop.launches import metrics
from tests.trainer.multimodal import PLACEHOLDERS, token

STEPS = (
    "--train-iters 2 --fp32 --optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr-decay-style constant "
    "--lr-warmup-iters 0 --log-interval 1 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --save run"
)
"""Two steps in which the weights change by the gradients."""
BESIDE = (
    "visual",
    "model.merger",
    "vision_",
    "projector",
    "embed_vision",
    "connector",
    "aligner",
    "image_newline",
)
"""Words in the names of parameters that are not trained."""


def message(role: str, content: Any) -> Any:
    return {"role": role, "content": content}


def load_whole(directory: Path) -> Any:
    """transformers' whole model of DIRECTORY/hf."""
    import transformers

    load = transformers.AutoModelForImageTextToText.from_pretrained
    model = load(directory / "hf", dtype=torch.float32)
    if model.config.model_type == "gemma4_unified":
        model.register_forward_pre_hook(_masked_as_in_generation, with_kwargs=True)
    return model


def _masked_as_in_generation(model: Any, given: Any, named: dict[str, Any]) -> Any:
    """Give Gemma 4 12B its mask: in layers without a window, its forward alone lets images attend in both directions."""
    ids = named["input_ids"]
    named["attention_mask"] = model.create_masks_for_generate(
        model.config, ids.unsqueeze(-1).float(), None, None, torch.arange(ids.shape[1])[None], named["mm_token_type_ids"],
    )  # fmt: skip
    return given, named


class OfTransformers:
    """transformers' whole model of DIRECTORY/hf, or a model of the same kind. It reads images in DIRECTORY/data."""

    def __init__(self, kind: str, directory: Path, model: Any = None) -> None:
        import transformers

        self.model = load_whole(directory) if model is None else model
        self._kind, self._data, self._transformers = kind, directory / "data", transformers
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "hf")
        self._processor = transformers.AutoImageProcessor.from_pretrained(directory / "hf")

    def prompt(self, question: Any, names: tuple[str, ...]) -> tuple[list[int], dict[str, Any]]:
        """(tokens up to the answer, arguments of the images). question: the content of a message, with parts for images."""
        from PIL import Image

        text = self._tokenizer.apply_chat_template(
            [message("user", question)], tokenize=False, add_generation_prompt=True
        )
        arguments: dict[str, Any] = {}
        if names:
            images = [Image.open(self._data / name) for name in names]
            arguments, written = shown(self._kind, images, self._processor, self._transformers)
            first, *others = text.split(PLACEHOLDERS.get(self._kind, WORD))
            text = first + "".join(map("".join, zip(written, others, strict=True)))
        return self._tokenizer(text, add_special_tokens=False)["input_ids"], arguments

    def log_probability(
        self, question: Any, names: tuple[str, ...], answer: str | list[int]
    ) -> torch.Tensor:
        """Of an answer, with its end if it is a text."""
        if isinstance(answer, str):
            text = f"{answer}<|im_end|>"
            answer = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        scores = self.logits(question, names, answer).log_softmax(-1)
        return scores.gather(1, torch.tensor(answer)[:, None]).sum()

    def logits(self, question: Any, names: tuple[str, ...], answer: list[int]) -> torch.Tensor:
        """[tokens of the answer, vocabulary]: of each of these tokens."""
        prompt, arguments = self.prompt(question, names)
        given = self._given([*prompt, *answer], len(prompt), arguments)
        logits: torch.Tensor = self.model(**given).logits[0, len(prompt) - 1 : -1]
        return logits

    def last_hidden(
        self, question: Any, names: tuple[str, ...], answer: str, end: str
    ) -> torch.Tensor:
        """[hidden]: what the head reads of the last token of an answer with its end."""
        prompt, arguments = self.prompt(question, names)
        text = self._tokenizer(f"{answer}{end}", add_special_tokens=False)["input_ids"]
        found: list[torch.Tensor] = []
        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        self.model(**self._given([*prompt, *text], len(prompt), arguments))
        hook.remove()
        return found[0][0, -1]

    def score(self, question: Any, names: tuple[str, ...], answer: str) -> float:
        """Of an answer, by a model with a head of scores."""
        prompt, arguments = self.prompt(question, names)
        text = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = self.model(**self._given([*prompt, *text], len(prompt), arguments)).logits
        found: float = logits.item()
        return found

    def completion(self, question: Any, names: tuple[str, ...], count: int) -> list[int]:
        """The likeliest tokens, one by one."""
        prompt, arguments = self.prompt(question, names)
        given = self._given(prompt, len(prompt), arguments)
        made = self.model.generate(
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            **given,
        )
        ids: list[int] = made[0, len(prompt) :].tolist()
        return ids

    def _given(self, row: list[int], asked: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward pass. asked: number of the prompt's tokens. arguments: of the images."""
        ids = torch.tensor([row])
        # Causal attention: what stands for no image is text.
        of_images = (ids == token(WORD)) & (torch.arange(len(row)) < asked)
        types = of_images.int()
        given = {**arguments, "input_ids": ids, "mm_token_type_ids": types, "token_type_ids": types}
        known = signature(self.model.forward).parameters
        return {name: value for name, value in given.items() if name in known}

    def learn(self, loss: torch.Tensor, lr: float) -> None:
        """Make a step of SGD on the language model."""
        learn(self.model, loss, lr)


def learn(model: Any, loss: torch.Tensor, lr: float) -> None:
    """Make a step of SGD on the language model of transformers' whole model."""
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not any(part in name for part in BESIDE):
                parameter -= lr * parameter.grad
            parameter.grad = None


def figures(directory: Path, names: Sequence[str]) -> list[list[float]]:
    """The figures of each step."""
    return [[line[name] for name in names] for line in metrics(directory) if "loss" in line]


def all_figures(directory: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of training and of evaluation by name, without times."""
    ends = tuple(names)
    return [
        {name: value for name, value in line.items() if name.endswith(ends)}
        for line in metrics(directory)
    ]


def assert_figures(
    directory: Path, names: Sequence[str], expected: list[list[float]], within: float = 1e-5
) -> None:
    """The figures of each step are the first ones that are expected. within: the difference of figures near 0."""
    found = figures(directory, names)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs[: len(names)], rel=1e-5, abs=within)


def assert_weights(directory: Path, model: Any, without: Sequence[str] = ()) -> None:
    """The run's weights in the original's files are those of transformers' model. without: names that the run lacks."""
    import transformers

    megaconv.convert(
        directory / "run", directory / "back", saver="hf", base=directory / "hf", optimizer=False,
        allow_lossy=["out_norm"],
    )  # fmt: skip
    load = transformers.AutoModelForImageTextToText.from_pretrained
    found = dict(load(directory / "back", dtype=torch.float32).named_parameters())
    before = dict(load(directory / "hf", dtype=torch.float32).named_parameters())
    moved = 0.0
    compared = [(name, each) for name, each in model.named_parameters() if name not in without]
    for name, expected in compared:
        change = (expected - before[name]).abs().max()
        allowed = 1e-4 * change + 2e-7 * expected.abs().max()
        assert (found[name] - expected).abs().max() <= allowed, name
        moved = max(moved, change.item())
    assert moved > 1e-3
