"""The judges can tell: a run that breaks a promise is seen to break it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trust.judging import ABSENT, Failure, check_nothing_left, check_one_of, state

BROKEN = {
    "executed": "os.system('true')",
    "outside": "open(outside / 'secret').close()",
    "traceback": "raise ArithmeticError('nobody caught this')",
    "hang": "time.sleep(300)",
    "memory": "bytearray(b'x') * (600 << 20)",
    "message": "sys.exit(3)",
    "": "print('megaconv: error: something is wrong', file=sys.stderr); sys.exit(3)",
}
"""The code of a command by the promise that it breaks."""

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from megaconv.commands import cli
from tests.trust import server
from tests.trust.judging import Failure, check_conduct
folder, broken, found = Path(sys.argv[1]), json.loads(sys.argv[2]), {}
outside = folder / "outside"
server.warm_up()
for promise, code in broken.items():
    def command():
        exec(code, globals())
        return 0
    def prepare():
        cli.main = command
    seconds = 2 if promise == "hang" else 40  # a busy machine may take this long
    outcome = server.run("inspect", folder=folder, prepare=prepare, outside=outside, seconds=seconds)
    try:
        check_conduct(outcome)
        found[promise] = ""
    except Failure as failure:
        found[promise] = failure.promise
print(json.dumps(found))
"""


def test_every_kind_of_misconduct_is_seen(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(BROKEN)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {promise: promise for promise in BROKEN}


def test_a_mixture_of_two_outputs_a_lost_one_and_remains_are_seen(tmp_path: Path) -> None:
    states = []
    for content in ("old", "new"):
        made = tmp_path / content
        made.mkdir()
        (made / "a").write_text(content)
        (made / "b").write_text(content)
        states.append(state(made))
        check_one_of(made, states, "whole")
    (tmp_path / "new" / "b").write_text("old")
    with pytest.raises(Failure, match=r"wrong: .* [ab] differ"):
        check_one_of(tmp_path / "new", states, "mixed")
    with pytest.raises(Failure, match="lost"):
        check_one_of(tmp_path / "gone", states, "gone")
    check_one_of(tmp_path / "gone", [ABSENT], "gone")
    with pytest.raises(Failure, match=r"left: .*new, with 2"):
        check_nothing_left(tmp_path, ("old",), "remains")
