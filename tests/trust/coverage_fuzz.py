"""Fuzzing that is guided by the code that inputs reach, with atheris (`pip install atheris`), which is no requirement.

    python -m tests.trust.coverage_fuzz "torch file" --seconds 600

One target of fuzz.py at a time. Inputs are kept in a directory that is printed; one that fails is left in the working
directory as crash-..., and libFuzzer says how.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: pip install atheris")

with atheris.instrument_imports(include=["formats"], enable_loader_override=False):
    from formats.errors import CheckpointError
    from tests.trust import fuzz

from tests.trust import checkpoints, server
from tests.trust.bench import Bench

_MEMORY_MB = 500
_INPUT_SECONDS = 10


def main() -> None:
    targets = {name: (parse, pattern) for name, _, parse, pattern, _ in fuzz.TARGETS}
    parser = argparse.ArgumentParser(prog="python -m tests.trust.coverage_fuzz")
    parser.add_argument("target", choices=targets)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    parse, pattern = targets[options.target]
    root = Path(tempfile.mkdtemp(prefix="trust-"))
    corpus = _corpus(root, pattern)
    print(f"inputs: {corpus}", file=sys.stderr)
    work = root / "work"
    work.mkdir()

    def one_input(content: bytes) -> None:
        with contextlib.suppress(CheckpointError):
            parse(content, work)

    limits = [
        f"-max_total_time={options.seconds}",
        f"-rss_limit_mb={_MEMORY_MB}",
        f"-timeout={_INPUT_SECONDS}",
    ]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], one_input)
    atheris.Fuzz()


def _corpus(root: Path, pattern: str) -> Path:
    """The inputs of the seeded mutator, one file each."""
    server.warm_up()
    made = checkpoints.make(root)
    bench = Bench(root, 0, 0, made)
    bench.fresh_folder()
    corpus = Path(tempfile.mkdtemp(prefix="trust-inputs-"))
    for number, content in enumerate(fuzz.seeds(bench, pattern)):
        (corpus / str(number)).write_bytes(content)
    shutil.rmtree(root / "sources")
    return corpus


if __name__ == "__main__":
    main()
