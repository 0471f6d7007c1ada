"""`megatron-lite chat`: a conversation on the terminal with the tokenizer's chat template, or texts that the model
continues."""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from threading import Event

from formats.wording import counted
from megaconv.errors import UsageError
from megatron_lite.data.encoding import has_half_character
from megatron_lite.inference.answer import Said
from megatron_lite.inference.batching import RunningBatch, steps
from megatron_lite.inference.begun_answers import begun_answer, show
from megatron_lite.inference.commands.chat import HELP, RAW_HELP
from megatron_lite.inference.conversation import Conversation
from megatron_lite.inference.flags import show_without_effect
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.generating import sampling_of
from megatron_lite.inference.opening import Opened, run
from megatron_lite.inference.prompts import encode, encode_chat, start_of
from megatron_lite.inference.requests import Request
from megatron_lite.inference.slots import NotFinite
from megatron_lite.inference.text import say


def main(given: argparse.Namespace) -> None:
    """Run the command. Raises UsageError."""
    if given.raw and given.system:
        raise UsageError("--raw continues texts, which have no system message; leave --system out")
    sampling_of(given)  # raises before anything is loaded
    show_without_effect(given)
    run(given, lambda opened: _use(opened, given))


def _use(opened: Opened, given: argparse.Namespace) -> None:
    if sys.stdin.isatty():
        print(RAW_HELP if given.raw else HELP, file=sys.stderr)
    # Each turn computes only the tokens that are new in the conversation.
    batch = RunningBatch(opened.model, reuse_rows=True)
    if given.raw:
        _continue_texts(opened, batch, given)
    else:
        _talk(opened, batch, given)


def _continue_texts(opened: Opened, batch: RunningBatch, given: argparse.Namespace) -> None:
    """Continue each line. An empty line is a text without a prompt."""
    for line in _lines(opened):
        try:
            prompt = encode(opened.tokenizer, line) if line else start_of(opened.tokenizer)
            _answer(opened, batch, given, prompt)
        except (UsageError, NotFinite) as error:
            print(error, file=sys.stderr)


def _talk(opened: Opened, batch: RunningBatch, given: argparse.Namespace) -> None:
    begin = [{"role": "system", "content": given.system}] if given.system else []
    # This raises if there is no usable chat template.
    encode_chat(opened.tokenizer, [*begin, {"role": "user", "content": "?"}])
    talk = Conversation(opened.images, begin)
    for line in _lines(opened):
        try:
            if not talk.hear(line):
                continue
        except UsageError as error:
            print(error, file=sys.stderr)
            continue
        try:
            prompt = encode_chat(opened.tokenizer, talk.messages, pictures=talk.pictures)
            talk.answered(_answer(opened, batch, given, prompt, talk.pictures))
        except (UsageError, NotFinite) as error:
            print(f"{error}; /new begins another conversation", file=sys.stderr)
            talk.unanswered()


def _lines(opened: Opened) -> Iterator[str]:
    """Yield the user's lines, also empty ones."""
    shown = "> " if sys.stdin.isatty() else ""
    if shown:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() the arrow keys
    if isinstance(sys.stdin, TextIOWrapper):
        # A line that is not UTF-8 must not end the conversation.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            with opened.model.waiting():
                line = input(shown).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()  # so that the shell's prompt starts on a new line
            raise
        if line == "/quit":
            return
        if has_half_character(line):
            print("the line has bytes that are not UTF-8; it was left out", file=sys.stderr)
            continue
        yield line


def _answer(
    opened: Opened,
    batch: RunningBatch,
    given: argparse.Namespace,
    prompt: tuple[int, ...],
    pictures: Sequence[Picture] = (),
) -> str:
    """Print what the model makes of the prompt's tokens, and return its text. Raises UsageError, NotFinite."""
    if not prompt:
        raise UsageError("the tokenizer has no token to begin a text with; write its first word")
    room = opened.model.length - len(prompt)
    if room < 1:
        raise UsageError(
            f"the conversation has {counted(len(prompt), 'token')}; there is room for {opened.model.length}"
        )
    stops = frozenset() if given.ignore_eos else opened.stop_ids
    answer, text = begun_answer(opened, given.stop, prompt), ""
    asked = Request(prompt, min(given.max_new_tokens, room), sampling_of(given), stops)
    number = batch.add(replace(asked, pictures=tuple(pictures)))
    thinks = False
    with _interruptible(opened) as interrupted:
        for step in steps(batch):
            if step.end == "error":
                raise NotFinite
            said = Said() if step.end == "stop" else answer.add(step.token)
            thinks = show(said, thinks=thinks)
            text += said.text
            if answer.stop_word or interrupted.is_set():
                batch.cancel(number)
    rest = answer.finish(complete=True)
    show(rest, thinks=thinks)
    say("\n")
    return text + rest.text


@contextmanager
def _interruptible(opened: Opened) -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; a second one interrupts.

    With several processes Ctrl-C ends all of them, because their launcher passes it on.
    """
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
