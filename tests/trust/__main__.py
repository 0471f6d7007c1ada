"""The runner: `python -m tests.trust --kills 1000 --faults 10000 ... --seed 7 --jobs 2`."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.trust import checkpoints, faults, server
from tests.trust.attacks import ATTACKS
from tests.trust.report import Report
from tests.trust.workers import Task, work

_ROOM_BYTES = 2 << 30


def main() -> int:
    options = _options()
    wanted = {name: getattr(options, name) for name in ATTACKS if getattr(options, name)}
    tasks = [
        Task(name, number)
        for name, count in wanted.items()
        for number in range(ATTACKS[name].cases(count))
    ]
    if options.repeat:
        name, _, number = options.repeat.partition(":")
        tasks = [Task(name, int(number))]
    report = Report(options.seed)
    if any(task.attack == "faults" for task in tasks) and not faults.preloaded():
        reason = faults.preload_and_start_again()
        report.skip("faults", reason)
        tasks = [task for task in tasks if task.attack != "faults"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left in memory
    root = Path(tempfile.mkdtemp(prefix="trust-", dir=options.folder or _quick_place()))
    try:
        server.warm_up()
        made = checkpoints.make(root, options.sources)
        for result in work(
            tasks, root, made, seed=options.seed, jobs=options.jobs, keep=options.keep
        ):
            report.add(result)
    finally:
        if options.keep:
            print(f"kept: {root}", file=sys.stderr)
        else:
            shutil.rmtree(root, ignore_errors=True)
    print(report.markdown())
    if options.report:
        options.report.write_text(report.json())
    return int(report.failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust", description="Attacks megaconv and its trainer."
    )
    for name, attack in ATTACKS.items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=attack.what)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that work at once")
    parser.add_argument(
        "--repeat", metavar="ATTACK:NUMBER", help="one case alone, with the same --seed"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the last case's files to look at"
    )
    parser.add_argument("--folder", type=Path, help="where to work; in memory unless said")
    parser.add_argument(
        "--sources", type=Path, help="where the checkpoints are kept for other runs"
    )
    parser.add_argument("--report", type=Path, help="a JSON file with counts and failures")
    return parser.parse_args()


def _quick_place() -> str | None:
    """Main memory, where the system offers files in it: fsync costs nothing there, and kills don't test it anyway."""
    memory = Path("/dev/shm")
    if (
        memory.is_dir()
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free > _ROOM_BYTES
    ):
        return str(memory)
    return None


if __name__ == "__main__":
    sys.exit(main())
