"""`megatron-lite generate`: continues prompts from the command line or a file, on the terminal as they come, or into a file."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from megaconv.errors import UsageError
from megaconv.terminal import one_line
from megatron_lite.data.resumable_lines import ResumableLines
from megatron_lite.inference.answer import Answer, Said
from megatron_lite.inference.batching import NO_TOKEN, RunningBatch, Step, steps
from megatron_lite.inference.beams import Beam, BeamSettings
from megatron_lite.inference.begun_answers import begun_answer, show, text_of
from megatron_lite.inference.chat_prompts import encode_prompt
from megatron_lite.inference.flags import show_without_effect
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.image_tokens import without_images
from megatron_lite.inference.live_search import open_live_search
from megatron_lite.inference.opening import Opened, run
from megatron_lite.inference.prompts import encode, start_of
from megatron_lite.inference.questions import Question, Questions, check_questions, questions_of
from megatron_lite.inference.requests import Request, TooLong, check
from megatron_lite.inference.retrieved import neighbors_of, read_retrieved
from megatron_lite.inference.retrieving import FindNeighbors, RetrievingModel, same_for_all
from megatron_lite.inference.sampling import Likelihood, Sampling
from megatron_lite.inference.slots import (
    DraftCounts,
    Drafter,
    NotFinite,
    require_known,
    require_top,
)
from megatron_lite.inference.text import say

BLOCK_TURNS = 64
"""Rows of a block for each slot."""


def sampling_of(given: argparse.Namespace) -> Sampling:
    """Return the sampling options. Raises UsageError."""
    return Sampling(
        given.temperature,
        given.top_k,
        given.top_p,
        given.repetition_penalty,
        given.seed,
        min_p=given.min_p,
    )


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    sampling_of(given)  # raises before anything is loaded
    show_without_effect(given)
    has_file = given.prompts_file is not None
    has_log_probs = given.log_probs is not None
    check_questions(given)
    _check_output(given.output)
    if given.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {given.max_new_tokens} must be 1 or more")
    for flag, source in {
        "--prompts-file": given.prompts_file,
        "--retro-neighbors": given.retro_neighbors,
    }.items():
        require_other_file(given.output, flag, source)
    if has_log_probs and given.log_probs < 0:
        raise UsageError(f"--log-probs {given.log_probs} must be 0 or more")
    if given.beams is not None:
        penalizes = given.repetition_penalty != 1
        excluded = given.temperature or penalizes or given.stop or has_log_probs
        if given.beams < 1 or excluded:
            raise UsageError(
                "--beams must be 1 or more, and excludes --temperature, --repetition-penalty, --stop, --log-probs"
            )
    if not has_file:  # don't allocate slots for more rows than there are
        prompts = max(len(given.prompts), 1)
        samples = given.samples_per_prompt or given.num_samples
        given.slots = min(given.slots, prompts * samples)
    given.slots = max(given.slots, given.beams or 0)
    run(given, lambda opened: _use(opened, given))


def _check_output(output: str | None) -> None:
    """Raise UsageError for a pipe or a device, which can't be replaced or continued."""
    path = Path(output or "-")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"--output {path}: is not a file; --output - writes to standard output")


def _use(opened: Opened, given: argparse.Namespace) -> None:
    """Generate the answers. Raises NotFinite at the end if an answer had NaN or infinite logits."""
    require_top("--log-probs", given.log_probs or 0, opened.config.vocab)
    if given.retro_neighbors is not None:
        if _with_passages(opened, given):
            raise NotFinite
        return
    if given.retro_project_dir is not None:
        _require_retrieval(opened, "--retro-project-dir")
        find = open_live_search(
            opened, given.retro_project_dir, megatron=given.retro_megatron_neighbors
        )
        opened = _retrieving(opened, find)
    questions = questions_of(given)
    if not questions:
        raise UsageError(f"{given.prompts_file}: holds no prompts")
    _check_all(opened, given, questions)
    if given.output and given.output != "-":
        failed = _write(opened, given, questions)
    elif given.output or given.beams:
        failed = _print_lines(opened, given, questions)
    else:
        failed = _stream(opened, given, questions)
    if isinstance(opened.model, Drafter):
        print(_of_drafts(opened.model.counts), file=sys.stderr)
    if failed:
        raise NotFinite


def _of_drafts(counts: DraftCounts) -> str:
    """Return the line about drafts."""
    return (
        f"drafts: {counts.accepted:,} of {counts.drafted:,} tokens accepted, "
        f"{counts.tokens_a_step:.2f} tokens a step with drafts"
    )


def _require_retrieval(opened: Opened, flag: str) -> None:
    if not opened.config.retrieval.layers:
        raise UsageError(f"{flag}: {opened.path} is a {opened.config.family} without retrieval")
    if opened.model.grid.world > 1:
        raise UsageError(f"{flag}: generation is in one process; start only one")


def _retrieving(opened: Opened, find: FindNeighbors) -> Opened:
    """Return the opened model with neighbors."""
    model = RetrievingModel(opened.model.engine, find, opened.model.slots, opened.model.length)
    return replace(opened, retrieving=model)


def _with_passages(opened: Opened, given: argparse.Namespace) -> bool:
    """Answer the prompts of --retro-neighbors, and return whether an answer is an error. Raises UsageError."""
    _require_retrieval(opened, "--retro-neighbors")
    failed, chunk = False, opened.config.retrieval.chunk
    asked = read_retrieved(given.retro_neighbors)
    with open_output(given.output or "-") as file:
        for number, each in enumerate(asked):
            passages = neighbors_of(opened.config.retrieval, opened.tokenizer, each)
            model = _retrieving(opened, same_for_all(passages, chunk))
            question = Question(number, each.prompt, given.seed)
            for line in answers(model, given, [question]):
                failed |= "error" in line
                shown = json.dumps(line, ensure_ascii=False)
                print(shown if given.output else each.prompt + line["text"], file=file, flush=True)
    return failed


def _write(opened: Opened, given: argparse.Namespace, questions: Questions) -> bool:
    """Write the answers to the output file, and return whether one of them is an error."""
    failed = False

    def check_line(number: int, line: Mapping[str, Any]) -> None:
        nonlocal failed
        failed |= "error" in line
        for question in questions.part(number, number + 1):
            asked = question.asked
            if asked != {name: line.get(name) for name in asked}:
                raise UsageError(
                    f"{given.output}:{number + 1}: is of another prompt; resume with the same flags"
                )

    block = BLOCK_TURNS * opened.model.slots
    path = Path(given.output)
    with ResumableLines(path, resume=given.resume, overwrite=True, block=block) as lines:
        lines.start(len(questions), check_line)
        for line in all_answers(opened, given, questions, lines.first):
            failed |= "error" in line
            lines.write(line)
    return failed


def _check_all(opened: Opened, given: argparse.Namespace, questions: Questions) -> None:
    """Raise UsageError for a prompt that can't be answered, before an answer is written or a file replaced.

    A prompt with images is checked when its turn comes, because images take long to read.
    """
    for question in questions.part(0, len(questions), questions.samples):
        if question.chat is not None and question.chat.has_images:
            continue
        number = f"prompt {question.number + 1}: " if len(questions.prompts) > 1 else ""
        try:
            check(request_of(opened, given, question), opened.answering.length)
        except TooLong as error:
            remedy = "shorten the prompt, lower --max-new-tokens, or raise --max-length"
            raise UsageError(f"{number}{error}; {remedy}") from error
        except UsageError as error:
            raise UsageError(f"{number}{error}") from error


def _print_lines(opened: Opened, given: argparse.Namespace, questions: Questions) -> bool:
    failed = False
    with open_output("-") as file:
        for line in all_answers(opened, given, questions):
            failed |= "error" in line
            shown = json.dumps(line, ensure_ascii=False) if given.output else _rows(line)
            print(shown, file=file, flush=True)
    return failed


def _rows(line: dict[str, Any]) -> str:
    """Return the text of beams for the terminal."""
    shown = [
        f"{beam['score']:9.4f}  {one_line(line['prompt'] + beam['text'])}"
        for beam in line.get("beams", ())
    ]
    return "\n".join(shown) if shown else f"    error  {one_line(line['prompt'])}"


def _stream(opened: Opened, given: argparse.Namespace, questions: Questions) -> bool:
    """Answer one prompt after the other, and print each token as it comes."""
    failed = False
    for number, question in enumerate(questions.part(0, len(questions))):
        batch, wanted = RunningBatch(opened.answering), request_of(opened, given, question)
        answer = _begun(opened, given, question, wanted.prompt)
        # This may raise, so it comes before the prompt is printed.
        request = batch.add(wanted)
        if len(questions) > 1:
            print(f"{'' if number == 0 else chr(10)}[{number + 1}] ", end="")
        say(question.text + ("" if question.chat is None else "\n"))
        thinks = complete = False
        for step in steps(batch):
            failed |= step.end == "error"
            complete = step.end == "stop"
            thinks = show(new_text(step, answer), thinks=thinks)
            if answer.stop_word:
                batch.cancel(request)
        show(answer.finish(complete=complete), thinks=thinks)
        say("\n")
    return failed


def new_text(step: Step, answer: Answer) -> Said:
    """Return what has become final with a step. The token that ends an answer has no text."""
    return Said() if step.end == "stop" or step.token == NO_TOKEN else answer.add(step.token)


def request_of(opened: Opened, given: argparse.Namespace, question: Question) -> Request:
    """Return the request for a row. Raises UsageError for an invalid text or an unknown token."""
    pictures: tuple[Picture, ...] = ()
    if question.chat is not None:
        tokens, pictures = encode_prompt(question.chat, opened.tokenizer, opened.images)
    elif question.text:
        tokens = encode(opened.tokenizer, question.text)
    else:
        tokens = start_of(opened.tokenizer)
    require_known(without_images(tokens) if pictures else tokens, opened.config.vocab)
    return Request(
        tokens, given.max_new_tokens, replace(sampling_of(given), seed=question.seed),
        frozenset() if given.ignore_eos else opened.stop_ids, given.log_probs,
        BeamSettings(given.beams, given.length_penalty) if given.beams else None, pictures=pictures,
    )  # fmt: skip


def _begun(
    opened: Opened, given: argparse.Namespace, question: Question, prompt: Sequence[int]
) -> Answer:
    """Return the answer of a row before its first token. An answer to a chat is a text of its own."""
    return begun_answer(opened, given.stop, prompt, continues=question.chat is None)


@dataclass
class _Row:
    question: Question
    prompt: tuple[int, ...]
    answer: Answer
    shown: str = ""
    tokens: list[int] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    end: str | None = None
    beams: tuple[Beam, ...] = ()


def all_answers(
    opened: Opened, given: argparse.Namespace, questions: Questions, first: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the answers in order, from row `first` on, in blocks that don't share a running batch.

    Rounding depends on the other rows of a turn. A resumed run begins with a whole block, so it has the same turns.
    """
    block = BLOCK_TURNS * opened.model.slots
    for start in range(first, len(questions), block):
        asked = list(questions.part(start, start + block))
        for line in answers(opened, given, asked):
            yield _of_sample(line) if questions.unconditional else line


def answers(
    opened: Opened, given: argparse.Namespace, asked: Sequence[Question]
) -> Iterator[dict[str, Any]]:
    """Yield the answers in the order of the rows, each as soon as it and all earlier ones are ready."""
    batch = RunningBatch(opened.answering)
    waiting: dict[int, _Row] = {}
    questions = iter(asked)
    # A request holds its images. Others are added at once, so that their errors come first.
    has_images = any(question.chat is not None and question.chat.has_images for question in asked)
    most = 2 * opened.model.slots if has_images else len(asked)

    def add_further() -> None:
        for question in islice(questions, most - sum(batch.counts)):
            wanted = request_of(opened, given, question)
            begun = _begun(opened, given, question, wanted.prompt)
            waiting[batch.add(wanted)] = _Row(question, wanted.prompt, begun)

    for step in steps(batch, add_further):
        row = waiting[step.number]
        if step.token != NO_TOKEN:
            row.tokens.append(step.token)
        if step.likelihood is not None:
            row.likelihoods.append(step.likelihood)
        row.shown += new_text(step, row.answer).text
        row.end, row.beams = "stop" if row.answer.stop_word else step.end, step.beams
        if row.answer.stop_word:
            batch.cancel(step.number)
        if row.end:
            row.shown += row.answer.finish(complete=step.end == "stop").text
        while waiting and (first := next(iter(waiting.values()))).end:
            del waiting[next(iter(waiting))]
            line = _line(opened, first)
            numbered = given.unconditional or given.samples_per_prompt is not None
            yield {**line, "id": first.question.number} if numbered else line


def _of_sample(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a sample without a prompt, with the fields of Megatron's generate_samples_gpt.py."""
    text = line["text"]
    return {"text": text, "all_text": text, **{key: line[key] for key in line if key != "tokens"}}


def _line(opened: Opened, row: _Row) -> dict[str, Any]:
    if not row.beams:
        return _plain(row)
    found = []
    for beam in row.beams:
        answer = begun_answer(opened, (), row.prompt, continues=row.question.chat is None)
        text = text_of(answer, beam.tokens)
        found.append({"text": text, "tokens": list(beam.tokens), "score": beam.score})
    return {**row.question.asked, "beams": found}


def _plain(row: _Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        **row.question.asked,
        "text": row.shown,
        "tokens": row.tokens,
        "finish_reason": row.end,
    }
    if row.end == "error":
        found["error"] = str(NotFinite())
    if row.likelihoods:
        found["log_probs"] = [likelihood.log_prob for likelihood in row.likelihoods]
        if row.likelihoods[0].top:
            found["top_log_probs"] = [
                [list(pair) for pair in likelihood.top] for likelihood in row.likelihoods
            ]
    return found


def require_other_file(output: str | None, flag: str, source: str | None) -> None:
    """Raise UsageError if the output would replace the file that the flag names."""
    if output is None or source is None or "-" in (output, source):
        return
    written, read = Path(output), Path(source)
    if written.exists() and read.exists() and written.samefile(read):
        raise UsageError(f"--output {output}: is the file of {flag} too; choose another file")


def open_output(path: str) -> TextIO:
    """Open the output. Raises UsageError if it can't be written."""
    if path == "-":
        # Open the file descriptor, because standard output has no path.
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from error
