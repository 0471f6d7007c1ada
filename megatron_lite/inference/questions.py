"""The rows that `generate` continues: prompts, samples of each prompt, and samples without a prompt."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaconv.errors import UsageError
from megaconv.terminal import reason_of
from megatron_lite.data.encoding import BadRecord
from megatron_lite.inference.chat_prompts import ChatPrompt, read_chat
from megatron_lite.models.rng import mix


@dataclass(frozen=True)
class Question:
    """One row to continue."""

    number: int
    """Number of the prompt from 0; without prompts, of the sample."""
    text: str
    seed: int
    """The seed of this row's sample."""
    chat: ChatPrompt | None = None
    """The chat to answer, whose last message is `text`; None: continue `text`."""

    @property
    def asked(self) -> dict[str, str]:
        """The fields about the prompt in the line of its answer."""
        found = {"prompt": self.text}
        if self.chat is not None:
            found["chat"] = self.chat.identity
            if self.chat.reference is not None:
                found["reference"] = self.chat.reference
        return found


@dataclass(frozen=True)
class Questions:
    """All rows of a run."""

    prompts: Sequence[str | ChatPrompt]
    samples: int
    """Samples of each text."""
    seed: int
    unconditional: bool = False
    own_seeds: bool = True
    """True if each row has a seed of its own, from `seed` and the row's number. Else all rows have `seed`."""

    def __len__(self) -> int:
        return len(self.prompts) * self.samples

    def part(self, first: int, last: int, step: int = 1) -> Iterator[Question]:
        """Yield every `step`-th row from `first` up to but without `last`."""
        for row in range(first, min(last, len(self)), step):
            prompt = row // self.samples
            seed = mix(self.seed, row) if self.own_seeds else self.seed
            number = row if self.unconditional else prompt
            asked = self.prompts[prompt]
            if isinstance(asked, str):
                yield Question(number, asked, seed)
            else:
                yield Question(number, asked.text, seed, asked)


def questions_of(given: argparse.Namespace) -> Questions:
    """Return the rows that the flags of `generate` describe. Raises UsageError."""
    if given.unconditional:
        return Questions([""], given.num_samples, given.seed, unconditional=True)
    prompts = [*given.prompts, *(read_prompts(given.prompts_file) if given.prompts_file else ())]
    several = given.samples_per_prompt is not None
    return Questions(prompts, given.samples_per_prompt or 1, given.seed, own_seeds=several)


def check_questions(given: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other."""
    if given.length_penalty != 1 and given.beams is None:
        raise UsageError("--length-penalty requires --beams")
    if given.retro_neighbors is not None:
        _check_retrieved(given)
        return
    if given.unconditional and (given.prompts or given.prompts_file is not None):
        raise UsageError("--unconditional excludes prompts and --prompts-file")
    if not given.unconditional and not given.prompts and given.prompts_file is None:
        raise UsageError("give a prompt, --prompts-file, --retro-neighbors, or --unconditional")
    if given.retro_megatron_neighbors and given.retro_project_dir is None:
        raise UsageError("--retro-megatron-neighbors requires --retro-project-dir")
    if given.num_samples != 1 and not given.unconditional:
        raise UsageError("--num-samples requires --unconditional; see --samples-per-prompt")
    if given.samples_per_prompt is not None and given.unconditional:
        raise UsageError("--samples-per-prompt excludes --unconditional; see --num-samples")
    samples = given.num_samples if given.samples_per_prompt is None else given.samples_per_prompt
    if samples < 1:
        raise UsageError(f"the number of samples is {samples}; it must be 1 or more")
    if samples > 1 and given.temperature == 0:
        raise UsageError("all samples are equal at --temperature 0; give a temperature above 0")
    if samples > 1 and given.beams:
        raise UsageError("--beams excludes several samples")
    if given.resume and given.output in (None, "-"):
        raise UsageError("--resume needs --output with a file")


def _check_retrieved(given: argparse.Namespace) -> None:
    """Raise UsageError for a flag that --retro-neighbors excludes."""
    others = {
        "prompts": given.prompts,
        "--prompts-file": given.prompts_file,
        "--unconditional": given.unconditional,
        "--samples-per-prompt": given.samples_per_prompt,
        "--beams": given.beams,
        "--resume": given.resume,
        "--retro-project-dir": given.retro_project_dir,
    }
    for name, asked in others.items():
        if asked:
            raise UsageError(
                f"--retro-neighbors has the prompts and their passages: it excludes {name}"
            )


def read_prompts(path: str) -> Iterator[str | ChatPrompt]:
    """Yield the prompts and chats of a file. Raises UsageError with the line."""
    try:
        read = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {reason_of(error)}") from error
    text = read.removeprefix("\ufeff")  # a file of Windows may begin with a byte order mark
    is_json = _has_json_lines(path, text)
    # A prompt may have other line ends within, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if is_json:
            yield _prompt_of(line, Path(path), number)
        else:
            yield line


def _has_json_lines(path: str, text: str) -> bool:
    """Return whether a file has JSON lines: its suffix says so, or the first line of a pipe, which has no suffix."""
    if path != "-" and Path(path).is_file():
        return path.endswith((".jsonl", ".json"))
    first, _, _ = text.lstrip().partition("\n")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _prompt_of(line: str, file: Path, number: int) -> str | ChatPrompt:
    """Return the prompt of a record; also of RealToxicityPrompts: {"prompt": {"text": ...}}; or its chat."""
    where = f"{file}:{number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UsageError(
            f'{where}: expected an object with "prompt" or "messages", found {line[:60]!r}'
        )
    if "prompt" not in record:
        try:
            return read_chat(record, file, number)
        except BadRecord as error:
            raise UsageError(f"{where}: {error}") from error
    prompt = record["prompt"]
    text = prompt.get("text") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str):
        raise UsageError(f"{where}: the prompt should be text, found {prompt!r:.60}")
    return text
