"""Size and time of a patch, beside a copy, `zstd` of the whole checkpoint, and `zstd --patch-from`.

    python benchmarks/delta.py [--layers 8] [--dir /fast/disk]

Makes the model of benchmarks/convert.py with normally distributed weights, and from it two newer ones: one in which each element
moves by a step of a finetuning (1e-3 of its size), and one in which 2% of the elements do, as in a step of reinforcement
learning. Prints bytes and processor seconds of each way, and of `apply`. A row is left out if the program isn't installed.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from convert import environment, make_model

WEIGHTS = "model.safetensors"
SIGMA, STEP = 0.02, 1e-3


def as_bf16(values: "np.ndarray") -> "np.ndarray":
    """float32 values as the bits of bfloat16, rounded to nearest."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_models(work: Path, layers: int) -> None:
    """Write `old`, `finetuned` and `sparse` with the same header."""
    make_model(work / "old", layers)
    with (work / "old" / WEIGHTS).open("rb") as file:
        head = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        header = file.read(head)
    elements = ((work / "old" / WEIGHTS).stat().st_size - head) // 2
    for name in ("finetuned", "sparse"):
        (work / name).mkdir()
        shutil.copy(work / "old" / "config.json", work / name)
    random = np.random.default_rng(0)
    files = {name: (work / name / WEIGHTS).open("wb") for name in ("old", "finetuned", "sparse")}
    for file in files.values():
        file.write(header)
    for start in range(0, elements, 1 << 22):
        count = min(1 << 22, elements - start)
        values = random.standard_normal(count, dtype=np.float32) * np.float32(SIGMA)
        step = values * random.standard_normal(count, dtype=np.float32) * np.float32(STEP)
        chosen = random.random(count, dtype=np.float32) < 0.02
        files["old"].write(as_bf16(values).tobytes())
        files["finetuned"].write(as_bf16(values + step).tobytes())
        files["sparse"].write(
            as_bf16(np.where(chosen, values * np.float32(1.05), values)).tobytes()
        )
    for file in files.values():
        file.close()


def timed(command: list[str]) -> float:
    """Processor seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def size(path: Path) -> int:
    """Bytes of a file or of all files of a directory."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)


def measure(work: Path, new: str) -> list[tuple[str, int, float]]:
    """(way, bytes, processor seconds) of each way to keep `new`."""
    old, newer, patch = work / "old", work / new, work / "patch"
    megaconv = [sys.executable, "-m", "megaconv"]
    one = str(newer / WEIGHTS)
    ways: dict[str, tuple[list[str], Path]] = {
        "cp": (["cp", "-r", str(newer), str(work / "copy")], work / "copy"),
        "zstd": (["zstd", "-q", "-3", one, "-o", str(work / "whole.zst")], work / "whole.zst"),
        "zstd --patch-from": (
            [
                "zstd",
                "-q",
                "-3",
                "--long=31",
                f"--patch-from={old / WEIGHTS}",
                one,
                "-o",
                str(work / "from.zst"),
            ],
            work / "from.zst",
        ),
        "xdelta3": (
            ["xdelta3", "-q", "-e", "-s", str(old / WEIGHTS), one, str(work / "x")],
            work / "x",
        ),
        "megaconv delta": (
            [*megaconv, "delta", str(old), str(newer), "--save-dir", str(patch)],
            patch,
        ),
    }
    rows = []
    for way, (command, target) in ways.items():
        if shutil.which(command[0]) is not None:
            seconds = timed(command)
            rows.append((way, size(target), seconds))
    apply = [*megaconv, "apply", str(old), str(patch), "--save-dir", str(work / "made")]
    rows.append(("megaconv apply", size(newer), timed(apply)))
    for name in ("copy", "patch", "made"):
        shutil.rmtree(work / name, ignore_errors=True)
    for name in ("whole.zst", "from.zst", "x"):
        (work / name).unlink(missing_ok=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        write_models(work, args.layers)
        for new in ("finetuned", "sparse"):
            print(new)
            for way, nbytes, seconds in measure(work, new):
                share = 100 * nbytes / size(work / new)
                print(f"  {way:<18} {nbytes:>13,} bytes {share:6.1f}% {seconds:8.2f} s")


if __name__ == "__main__":
    main()
