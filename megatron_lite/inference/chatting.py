"""`megatron-lite chat`: a conversation on the terminal, in the form that the tokenizer's own template gives it."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

from megaconv.errors import UsageError
from megatron_lite.inference.batching import Request, RunningBatch, steps
from megatron_lite.inference.generating import add_sampling, sampling_of
from megatron_lite.inference.opening import Opened, Parser, command, make_parser, run
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.slots import NotFinite
from megatron_lite.inference.text import TextStream, say

EXAMPLES = """  megatron-lite chat --load Llama-3.2-1B-Instruct --temperature 0.7
  echo "What is a torus?" | megatron-lite chat --load tuned --system "Answer in one sentence." """

HELP = "A line is a message; /new begins another conversation, Ctrl-C ends an answer, /quit or the end of the input the program."


def parser() -> Parser:
    made = make_parser("chat", f"Talk with a model. {HELP}", EXAMPLES)
    made.add_argument("--system", metavar="TEXT", help="a message of the system in front of all others")
    add_sampling(made, max_new_tokens=512)
    return made


def main(words: list[str]) -> int:
    return command(parser(), words, _main)


def _main(given: argparse.Namespace) -> None:
    sampling_of(given)  # raises before anything is loaded
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    begin = [{"role": "system", "content": given.system}] if given.system else []
    encode_chat(opened.tokenizer, [*begin, {"role": "user", "content": "?"}])  # raises where nobody can chat
    messages = list(begin)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    for line in _lines(opened):
        if line == "/new":
            messages = list(begin)
            continue
        messages.append({"role": "user", "content": line})
        try:
            said = _answer(opened, given, messages)
        except (UsageError, NotFinite) as error:
            print(f"{error}; /new begins another conversation", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": said})


def _lines(opened: Opened) -> Iterator[str]:
    """What the user says."""
    shown = "> " if sys.stdin.isatty() else ""
    if shown:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() the arrow keys
    while True:
        try:
            with opened.model.waiting():
                line = input(shown).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()  # so that the shell's prompt has a line of its own
            raise
        if line == "/quit":
            return
        if line:
            yield line


def _answer(opened: Opened, given: argparse.Namespace, messages: list[dict[str, Any]]) -> str:
    prompt = encode_chat(opened.tokenizer, messages)
    room = opened.model.length - len(prompt)
    if room < 1:
        raise UsageError(f"the conversation has {len(prompt)} tokens; there is room for {opened.model.length}")
    stops = frozenset() if given.ignore_eos else opened.stop_ids
    batch, text, said = RunningBatch(opened.model), TextStream(opened.tokenizer.detokenize, given.stop), ""
    number = batch.add(Request(prompt, min(given.max_new_tokens, room), sampling_of(given), stops))
    with _interruptible(opened) as interrupted:
        for step in steps(batch):
            if step.end == "error":
                raise NotFinite
            piece = "" if step.end == "stop" else text.add(step.token)
            said += piece
            say(piece)
            if text.stopped or interrupted.is_set():
                batch.cancel(number)
    rest = text.finish()
    say(rest + "\n")
    return said + rest


@contextmanager
def _interruptible(opened: Opened) -> Iterator[Event]:
    """An event that Ctrl-C sets meanwhile, once. Of several processes it ends all: their launcher sees to that."""
    interrupted = Event()

    def once(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    if opened.model.grid.world > 1:
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, once)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
