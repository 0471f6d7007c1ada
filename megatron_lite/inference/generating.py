"""`megatron-lite generate`: prompts from the command line or a file, answers to the terminal as they come, or to a file."""

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
from megatron_lite.inference.opening import Opened, Parser, command, make_parser, run
from megatron_lite.inference.prompts import encode
from megatron_lite.inference.sampling import Likelihood, Sampling
from megatron_lite.inference.slots import NotFinite
from megatron_lite.inference.text import TextStream, say

EXAMPLES = """  megatron-lite generate --load Llama-2-7b "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-p 0.95
  torchrun --nproc-per-node 4 -m megatron_lite generate --load ckpt --tp 2 --pp 2 --prompts-file prompts.jsonl --output answers.jsonl"""


def add_sampling(parser: Parser, *, max_new_tokens: int) -> None:
    add = parser.add_argument_group("generation").add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"the most tokens of an answer ({max_new_tokens})",
    )
    add("--temperature", type=float, default=0.0, metavar="X", help="0: always the likeliest token (0)")
    add("--top-k", type=int, default=0, metavar="N", help="choose among so many likeliest (all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="choose among the likeliest that make up this probability (1)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens that came already become less likely (1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of samples (0)")
    add("--stop", nargs="+", default=[], metavar="WORD", help="end before one of these")
    add("--ignore-eos", action="store_true", help="go on after the end of the text")


def sampling_of(given: argparse.Namespace) -> Sampling:
    """Raises UsageError."""
    return Sampling(given.temperature, given.top_k, given.top_p, given.repetition_penalty, given.seed)


def parser() -> Parser:
    made = make_parser("generate", "Let a model continue texts.", EXAMPLES)
    made.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    made.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='JSON lines of {"prompt": ...} (.jsonl), or one prompt a line; - for standard input',
    )
    made.add_argument("--output", metavar="FILE", help="JSON lines, in the order of the prompts; - for standard output")
    add_sampling(made, max_new_tokens=64)
    made.add_argument(
        "--log-probs", type=int, metavar="N", help="also log-probabilities, and the N likeliest tokens (in --output)"
    )
    made.add_argument("--beams", type=int, metavar="N", help="beam search, as transformers has it")
    made.add_argument(
        "--length-penalty", type=float, default=1.0, metavar="X", help="of beams: above 0 favours long ones (1)"
    )
    return made


def main(words: list[str]) -> int:
    return command(parser(), words, _main)


def _main(given: argparse.Namespace) -> None:
    sampling_of(given)  # raises before anything is loaded
    if not given.prompts and given.prompts_file is None:
        raise UsageError("give a prompt, or --prompts-file")
    if given.log_probs is not None and given.log_probs < 0:
        raise UsageError(f"--log-probs {given.log_probs} has to be 0 or more")
    if given.beams is not None and (given.beams < 1 or given.temperature or given.stop or given.log_probs is not None):
        raise UsageError("--beams has to be 1 or more, and goes with none of --temperature, --stop, --log-probs")
    if given.prompts_file is None:  # no room for rows that nobody will ask for
        given.slots = min(given.slots, len(given.prompts))
    given.slots = max(given.slots, given.beams or 0)
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    """Raises NotFinite in the end where one of the answers came to that."""
    prompts = [*given.prompts, *(_read(given.prompts_file) if given.prompts_file else ())]
    if not given.beams and not given.output:
        _stream(opened, given, prompts)
        return
    failed = False
    with open_output(given.output or "-") as file:
        for line in answers(opened, given, prompts):
            failed |= "error" in line
            print(_rows(line) if not given.output else json.dumps(line, ensure_ascii=False), file=file, flush=True)
    if failed:
        raise NotFinite


def _rows(line: dict[str, Any]) -> str:
    """Beams for the terminal."""
    shown = [f"{beam['score']:9.4f}  {one_line(line['prompt'] + beam['text'])}" for beam in line.get("beams", ())]
    return "\n".join(shown) if shown else f"    error  {one_line(line['prompt'])}"


def _stream(opened: Opened, given: argparse.Namespace, prompts: list[str]) -> None:
    """One after the other, each as it is made."""
    failed = False
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}[{number + 1}] ", end="")
        batch, text = RunningBatch(opened.model), TextStream(opened.tokenizer.detokenize, given.stop)
        request = batch.add(request_of(opened, given, prompt))  # which may be refused, before anything of it is said
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
    """What can be said of the step already; the token that ends an answer isn't."""
    return "" if step.end == "stop" or step.token == NO_TOKEN else text.add(step.token)


def request_of(opened: Opened, given: argparse.Namespace, prompt: str) -> Request:
    return Request(
        encode(opened.tokenizer, prompt), given.max_new_tokens, sampling_of(given),
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


def answers(opened: Opened, given: argparse.Namespace, prompts: list[str]) -> Iterator[dict[str, Any]]:
    """In the order of the prompts, each as soon as it and those before it are ready."""
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
        found = [{"text": text, "tokens": list(beam.tokens), "score": beam.score} for text, beam in texts]
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
            found["top_log_probs"] = [[list(pair) for pair in likelihood.top] for likelihood in answer.likelihoods]
    return found


def open_output(path: str) -> TextIO:
    """Raises UsageError where it can't be written."""
    if path == "-":
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)  # a number, no path
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from error


def _read(path: str) -> Iterator[str]:
    """Raises UsageError with the line."""
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
            raise UsageError(f'{path}, line {number}: expected an object with "prompt", found {line[:60]!r}') from error
        if not isinstance(prompt, str):
            raise UsageError(f"{path}, line {number}: the prompt should be text, found {prompt!r:.60}")
        yield prompt
