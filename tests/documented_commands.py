"""The shell commands of README.md and docs/: read from the fenced blocks one by one, and run."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.runs import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(console|sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEREDOC = re.compile(r"<<'?(\w+)'?")
COMMENT = re.compile(r"\s{2,}# .*$|^#(?!!).*$", re.MULTILINE)
"""The rest of a line after two spaces and a `#`, or a line that is a comment."""


class Command(NamedTuple):
    """One command, with its continuation lines, its here-document or its loop."""

    page: str
    language: str
    text: str

    @property
    def plain(self) -> str:
        """The command on one line, without comments."""
        return " ".join(COMMENT.sub("", self.text).replace("\\\n", " ").split())


def commands_of(page: Path) -> list[Command]:
    """All commands of a page, in their order."""
    name = str(page.relative_to(ROOT))
    found: list[Command] = []
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        texts = _typed(block) if language == "console" else _statements(block)
        found += [Command(name, language, text) for text in texts]
    return found


def all_commands() -> list[Command]:
    """The commands of all pages."""
    return [command for page in PAGES for command in commands_of(page)]


def _typed(block: str) -> list[str]:
    """The commands of a terminal's block, without their output."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)


def _statements(block: str) -> Iterator[str]:
    """The commands of a script; a job script is one command."""
    if block.startswith("#!"):
        yield block.rstrip("\n")
        return
    lines: list[str] = []
    for line in block.splitlines():
        lines.append(line)
        text = "\n".join(lines)
        if _is_complete(text):
            if COMMENT.sub("", text).strip():
                yield text
            lines = []
    assert not lines, f"an unfinished command: {block}"


def _is_complete(text: str) -> bool:
    heredoc = HEREDOC.search(text)
    if heredoc:
        return text.splitlines()[-1] == heredoc[1]
    if text.startswith("for "):
        return text.endswith("\ndone")
    return not text.endswith("\\")


PROGRAMS = {
    "megaconv": "-m megaconv",
    "megatron-lite": "-m megatron_lite",
    "torchrun": "-m torch.distributed.run",
    "python": "",
    "hf": "-m huggingface_hub.cli.hf",
}
"""Program -> the arguments of this Python that run it."""


def shell_environment(programs: Path) -> dict[str, str]:
    """Variables with which the project's programs are on the PATH and no network is used. programs: an empty directory."""
    for name, arguments in PROGRAMS.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        path.chmod(0o755)
    return os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "",  # as users have it
    }


def in_bash(script: str, directory: Path, environment: dict[str, str], seconds: float) -> str:
    """Run a script that ends at its first failing command, and return all that it prints."""
    process = subprocess.Popen(
        ["bash", "-c", f"set -eo pipefail\n{script}\n"],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the script has left, such as a server
        process.wait()
    assert process.returncode == 0, f"{script}\n{output}"
    return output


def run_documented(
    command: Command, directory: Path, environment: dict[str, str], seconds: float
) -> str:
    """Run a command in the working directory. A single command of megaconv runs in this process, which saves most of the time."""
    if not command.plain.startswith("megaconv ") or re.search(r"[|&;>$]", command.plain):
        return in_bash(command.text, directory, environment, seconds)
    outcome = run(*shlex.split(command.plain)[1:])
    assert outcome.status == 0, f"{command.plain}\n{outcome.err}"
    return outcome.out + outcome.err
