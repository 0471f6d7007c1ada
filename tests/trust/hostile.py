"""The allowed effects of a hostile checkpoint: one line and an exit status. Nothing runs, nothing outside is read,
nothing hangs."""

import re
from pathlib import Path
from random import Random

from tests.trust import server
from tests.trust.bench import Bench, command
from tests.trust.gadgets import MARK
from tests.trust.judging import ABSENT, Failure, check_conduct, check_nothing_left, check_one_of

SECRET = "what lies outside of a checkpoint"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e]")
_COMMANDS = ("inspect", "convert", "convert", "fingerprint", "verify")


def judge(
    bench: Bench, random: Random, what: str, *, reading: str = "", linked: bool = False
) -> server.Outcome:
    """Read `source` of the bench's folder by one command or another.

    reading: options without which it can't be read.
    linked: a file of the source is a link to outside, which may be opened as weights are; what it holds must not come out.
    """
    folder, outside = bench.folder, bench.root / "outside"
    if not outside.is_dir():
        outside.mkdir(exist_ok=True)
        (outside / "secret").write_text(SECRET)
    chosen = random.choice(_COMMANDS)
    source = folder / "source"
    words: list[object] = (
        [chosen, source, *(reading.split() if chosen != "verify" else ())]
        if chosen != "convert"
        else command(source, folder / "out", "--saver core --tp 1", reading)
    )
    outcome = server.run(*words, folder=folder, outside=None if linked else outside)
    what = f"{what}; {chosen}"
    check_conduct(outcome, what, answers=(0, 4))
    _check_message(outcome, what)
    if (folder / MARK).exists():
        raise Failure("executed", what)
    if chosen == "convert" and outcome.status:
        check_one_of(folder / "out", (ABSENT,), what)
        check_nothing_left(folder, ("source", "out"), what)
    if SECRET in outcome.out + outcome.err or any(
        SECRET.encode() in path.read_bytes() for path in _small_files(folder / "out")
    ):
        raise Failure(
            "outside",
            f"{what}: the output, or what was said, holds what lies outside of the checkpoint",
        )
    return outcome


def _check_message(outcome: server.Outcome, what: str) -> None:
    if _CONTROL.search(outcome.err + outcome.out):
        raise Failure(
            "message", f"{what}: control characters in {outcome.err!r:.300}{outcome.out!r:.100}"
        )
    errors = [line for line in outcome.err.splitlines() if not line.startswith("megaconv: warning")]
    if outcome.status not in (0, 4) and len(errors) != 1:
        raise Failure("message", f"{what}: not one line: {outcome.err!r:.400}")


def _small_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
