"""`megatron-lite generate`: continues prompts from the command line or a file, on the terminal as they come, or into a file."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from megaconv.errors import UsageError
from megaconv.terminal import one_line
from megatron_lite.inference.batching import NO_TOKEN, Request, RunningBatch, Step, steps
from megatron_lite.inference.beams import Beam, BeamSettings
from megatron_lite.inference.opening import Opened, run
from megatron_lite.inference.prompts import encode
from megatron_lite.inference.sampling import Likelihood, Sampling
from megatron_lite.inference.slots import NotFinite, require_known
from megatron_lite.inference.text import TextStream, say


def sampling_of(given: argparse.Namespace) -> Sampling:
    """Return the sampling options. Raises UsageError."""
    return Sampling(
        given.temperature, given.top_k, given.top_p, given.repetition_penalty, given.seed
    )


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    sampling_of(given)  # raises before anything is loaded
    has_file = given.prompts_file is not None
    has_log_probs = given.log_probs is not None
    if not given.prompts and not has_file:
        raise UsageError("give a prompt, or --prompts-file")
    if has_log_probs and given.log_probs < 0:
        raise UsageError(f"--log-probs {given.log_probs} must be 0 or more")
    if given.beams is not None:
        excluded = given.temperature or given.stop or has_log_probs
        if given.beams < 1 or excluded:
            raise UsageError(
                "--beams must be 1 or more, and excludes --temperature, --stop, --log-probs"
            )
    if not has_file:  # don't allocate slots for more rows than prompts
        given.slots = min(given.slots, len(given.prompts))
    given.slots = max(given.slots, given.beams or 0)
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    """Generate the answers. Raises NotFinite at the end if an answer had NaN or infinite logits."""
    prompts = [*given.prompts, *(_read(given.prompts_file) if given.prompts_file else ())]
    if not given.beams and not given.output:
        _stream(opened, given, prompts)
        return
    failed = False
    with open_output(given.output or "-") as file:
        for line in answers(opened, given, prompts):
            failed |= "error" in line
            print(
                _rows(line) if not given.output else json.dumps(line, ensure_ascii=False),
                file=file,
                flush=True,
            )
    if failed:
        raise NotFinite


def _rows(line: dict[str, Any]) -> str:
    """Return the text of beams for the terminal."""
    shown = [
        f"{beam['score']:9.4f}  {one_line(line['prompt'] + beam['text'])}"
        for beam in line.get("beams", ())
    ]
    return "\n".join(shown) if shown else f"    error  {one_line(line['prompt'])}"


def _stream(opened: Opened, given: argparse.Namespace, prompts: list[str]) -> None:
    """Answer one prompt after the other, and print each token as it comes."""
    failed = False
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}[{number + 1}] ", end="")
        batch, text = (
            RunningBatch(opened.model),
            TextStream(opened.tokenizer.detokenize, given.stop),
        )
        request = batch.add(
            request_of(opened, given, prompt)
        )  # may raise, so do it before the prompt is printed
        say(prompt)
        for step in steps(batch):
            failed |= step.end == "error"
            say(said(step, text))
            if text.stopped:
                batch.cancel(request)
        say(text.finish() + "\n")
    if failed:
        raise NotFinite


def said(step: Step, text: TextStream) -> str:
    """Return the text of a step that can be printed already. The token that ends an answer has no text."""
    return "" if step.end == "stop" or step.token == NO_TOKEN else text.add(step.token)


def request_of(opened: Opened, given: argparse.Namespace, prompt: str) -> Request:
    """Return the request for a prompt. Raises UsageError for an invalid text or an unknown token."""
    tokens = encode(opened.tokenizer, prompt)
    require_known(tokens, opened.config.vocab)
    return Request(
        tokens, given.max_new_tokens, sampling_of(given),
        frozenset() if given.ignore_eos else opened.stop_ids, given.log_probs,
        BeamSettings(given.beams, given.length_penalty) if given.beams else None,
    )  # fmt: skip


@dataclass
class _Answer:
    prompt: str
    text: TextStream
    said: str = ""
    tokens: list[int] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    end: str | None = None
    beams: tuple[Beam, ...] = ()


def answers(
    opened: Opened, given: argparse.Namespace, prompts: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the answers in the order of the prompts, each as soon as it and all earlier ones are ready."""
    batch = RunningBatch(opened.model)
    waiting: dict[int, _Answer] = {}
    for prompt in prompts:
        text = TextStream(opened.tokenizer.detokenize, given.stop)
        waiting[batch.add(request_of(opened, given, prompt))] = _Answer(prompt, text)
    for step in steps(batch):
        answer = waiting[step.number]
        if step.token != NO_TOKEN:
            answer.tokens.append(step.token)
        if step.likelihood is not None:
            answer.likelihoods.append(step.likelihood)
        answer.said += said(step, answer.text)
        answer.end, answer.beams = "stop" if answer.text.stopped else step.end, step.beams
        if answer.text.stopped:
            batch.cancel(step.number)
        if answer.end:
            answer.said += answer.text.finish()
        while waiting and (first := next(iter(waiting.values()))).end:
            del waiting[next(iter(waiting))]
            yield _line(opened, first)


def _line(opened: Opened, answer: _Answer) -> dict[str, Any]:
    if answer.beams:
        texts = [(opened.tokenizer.detokenize(beam.tokens), beam) for beam in answer.beams]
        found = [
            {"text": text, "tokens": list(beam.tokens), "score": beam.score} for text, beam in texts
        ]
        return {"prompt": answer.prompt, "beams": found}
    return _plain(answer)


def _plain(answer: _Answer) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": answer.prompt,
        "text": answer.said,
        "tokens": answer.tokens,
        "finish_reason": answer.end,
    }
    if answer.end == "error":
        found["error"] = str(NotFinite())
    if answer.likelihoods:
        found["log_probs"] = [likelihood.log_prob for likelihood in answer.likelihoods]
        if answer.likelihoods[0].top:
            found["top_log_probs"] = [
                [list(pair) for pair in likelihood.top] for likelihood in answer.likelihoods
            ]
    return found


def open_output(path: str) -> TextIO:
    """Open the output. Raises UsageError if it can't be written."""
    if path == "-":
        return open(
            sys.stdout.fileno(), "w", encoding="utf-8", closefd=False
        )  # a file descriptor, not a path
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from error


def _read(path: str) -> Iterator[str]:
    """Yield the prompts of a file. Raises UsageError with the line."""
    try:
        lines = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from error
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        if not path.endswith((".jsonl", ".json")):
            yield line
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'{path}, line {number}: expected an object with "prompt", found {line[:60]!r}'
            ) from error
        if not isinstance(prompt, str):
            raise UsageError(
                f"{path}, line {number}: the prompt should be text, found {prompt!r:.60}"
            )
        yield prompt
