"""The answers to other questions, from which KTO estimates the divergence."""

from collections.abc import Hashable, Sequence

import numpy as np

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.image_chat import Stored
from megatron_lite.data.images.reader import ImageReader


def with_other_answers(examples: Sequence[Stored], reader: ImageReader | None) -> list[Stored]:
    """Return each example, followed by its question with the answer to another question.

    That is the answer of the example before, as in TRL, or of the last one before whose question differs. The first
    examples follow the last ones. A question keeps its images, and so does an answer. Raises BadRecord if all questions
    are the same.

    reader: of the images; None if there are none.
    """
    others = _others([_question(example, reader) for example in examples])
    made: list[Stored] = []
    for example, other in zip(examples, others, strict=True):
        made += [example, _with_answer_of(example, examples[other])]
    return made


def _question(example: Stored, reader: ImageReader | None) -> Hashable:
    """Return what two examples with the same question have in common: its tokens, and the contents of its images."""
    start = example.answer
    tokens = example.tokens[:start].tobytes()
    if reader is None:
        return tokens
    numbers = [image.number for image in example.images if image.start < start]
    return tokens, tuple(reader.content(number) for number in numbers)


def _others(questions: Sequence[Hashable]) -> list[int]:
    """Return for each question the number of the last one before it that differs; the first ones follow the last ones."""
    count = len(questions)
    last = next((n for n in reversed(range(count)) if questions[n] != questions[0]), None)
    if last is None:
        raise BadRecord(
            "all questions are the same; KTO compares with answers to other questions, so give examples of several"
        )
    found = [last]
    for number in range(1, count):
        before = number - 1
        found.append(found[before] if questions[before] == questions[number] else before)
    return found


def _with_answer_of(example: Stored, other: Stored) -> Stored:
    """Return the question of an example with the answer of another one."""
    here, there = example.answer, other.answer
    asked = [image for image in example.images if image.start < here]
    answered = [
        image._replace(start=image.start - there + here)
        for image in other.images
        if image.start >= there
    ]
    return Stored(
        np.concatenate((example.tokens[:here], other.tokens[there:])),
        np.concatenate((example.learned[:here], other.learned[there:])),
        [*asked, *answered],
    )
