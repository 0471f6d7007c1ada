"""Files that are no files, numbers beyond all bounds, names that lead elsewhere; and targets that nobody can have meant."""

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.runs import snapshot
from tests.trust import server
from tests.trust.bench import Bench, command
from tests.trust.checkpoints import SAVERS, SOURCES
from tests.trust.hostile import judge
from tests.trust.judging import Failure, check_conduct
from tests.trust.strange_values import HUGE, mutate_json

_GIGANTIC = (10**9, 10**12, 2**31, 2**63, 10**30, -1)


def attack(bench: Bench, case: int) -> None:
    random = bench.random("hostile files", case)
    if case % 10 == 9:
        _attack_target(bench, random)
        return
    names = list(bench.checkpoints)
    name = names[case % len(names)]
    bench.fresh_folder()
    source = bench.copy(name)
    change = random.choice(
        [
            _special,
            _special,
            _number,
            _number,
            _number,
            _header,
            _header,
            _name,
            _large,
            _tracker,
            _link,
        ]
    )
    text = change(bench, source, random)
    judge(
        bench,
        random,
        f"{name}: {text}",
        reading=bench.checkpoints[name].reading,
        linked=change is _link,
    )


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file())


# Files that are something else.


def _special(bench: Bench, source: Path, random: Random) -> str:
    file = random.choice(
        [
            *_files(source),
            source / "megaconv.json",
            source / "config.json",
            source / "tokenizer.json",
        ]
    )
    kind = random.choice(
        [
            "a pipe",
            "/dev/zero",
            "/dev/full",
            "/dev/tty",
            "a directory",
            "a socket",
            "a link to itself",
            "a dangling link",
        ]
    )
    file.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind.startswith("/dev"):
        file.symlink_to(kind)
    elif kind == "a directory":
        file.mkdir()
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as listener:
            here = Path.cwd()
            os.chdir(file.parent)
            listener.bind(file.name[:90])
            os.chdir(here)
    else:
        file.symlink_to(file.name if kind == "a link to itself" else "nowhere")
    return f"{file.relative_to(source)} is {kind}"


def _link(bench: Bench, source: Path, random: Random) -> str:
    file = random.choice(
        [
            source / "tokenizer.json",
            source / "hf" / "tokenizer.json",
            source / "generation_config.json",
            *_files(source),
        ]
    )
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    to = random.choice(
        [
            bench.root / "outside" / "secret",
            Path("../../outside/secret"),
            Path("/etc/passwd"),
            Path("/proc/self/environ"),
        ]
    )
    file.symlink_to(to)
    return f"{file.relative_to(source)} is a link to {to}"


def _large(bench: Bench, source: Path, random: Random) -> str:
    """A terabyte that takes no room, or megabytes of text."""
    file = random.choice(_files(source))
    name = file.relative_to(source)
    if random.random() < 0.4:
        with file.open("ab") as opened:
            opened.truncate(random.choice([1 << 32, 1 << 40]))
        return f"{name} has {file.stat().st_size} bytes"
    kind = random.choice(["brackets", "digits", "keys", "text", "spaces"])
    content = _megabytes_of(kind)
    if file.suffix == ".safetensors":
        content = struct.pack("<Q", len(content)) + content
    file.write_bytes(content)
    return f"{name} is {len(content)} bytes of {kind}"


def _megabytes_of(kind: str) -> bytes:
    count = 4_000_000
    if kind == "brackets":
        return b"[" * count
    if kind == "digits":
        return b'{"x": ' + b"9" * count + b"}"
    if kind == "text":
        return b'{"x": "' + b"a" * 10 * count + b'"}'
    if kind == "spaces":
        return b" " * 10 * count
    keys = {f"key {number}": number for number in range(count // 10)}
    return json.dumps(keys).encode()


# Numbers and names.


def _number(bench: Bench, source: Path, random: Random) -> str:
    """One number of a JSON file is gigantic."""
    files = [
        file
        for file in _files(source)
        if file.suffix in (".json", ".zarray") or file.name == ".zarray"
    ]
    if not files:
        return _header(bench, source, random)
    file = random.choice(files)
    document = json.loads(file.read_text())
    owners = [document, *(value for value in document.values() if isinstance(value, dict))]
    places = [
        (owner, key)
        for owner in owners
        for key, value in owner.items()
        if isinstance(value, (int, list))
    ]
    if not places:
        return _special(bench, source, random)
    owner, key = random.choice(places)
    new = random.choice(_GIGANTIC)
    owner[key] = [new] * len(owner[key]) if isinstance(owner[key], list) else new
    file.write_text(json.dumps(document))
    return f"{key} of {file.relative_to(source)} is {owner[key]}"


def _header(bench: Bench, source: Path, random: Random) -> str:
    """The header of a safetensors file says something else."""
    files = sorted(source.glob("*.safetensors"))
    if not files:
        return _special(bench, source, random)
    file = random.choice(files)
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, text = content[8 : 8 + length], ""
    if random.random() < 0.25:
        new_length = random.choice([n for n in HUGE if 0 <= n < 2**64])
        file.write_bytes(struct.pack("<Q", new_length) + content[8:])
        return f"{file.name}: a header of {new_length} bytes"
    if random.random() < 0.3:
        document = json.loads(header)
        old = random.choice([name for name in document if name != "__metadata__"])
        new = random.choice(
            [
                "a\nmegaconv: error: b",
                "\x1b[2J",
                "../../x",
                "a" * 100_000,
                "",
                old.upper(),
                "\u202e",
                "model.layers.99999999999.mlp.up_proj.weight",
            ]
        )
        document[new] = document.pop(old)
        header, text = json.dumps(document).encode(), f"{old} is called {new[:40]!r}"
    elif random.random() < 0.3:
        document = json.loads(header)
        del document[gone := random.choice(list(document))]
        header, text = json.dumps(document).encode(), f"without {gone}"
    else:
        header, text = mutate_json(header, random)
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    return f"{file.name}: {text}"


def _name(bench: Bench, source: Path, random: Random) -> str:
    """A file or directory is called as if there were a great many of them."""
    number = random.choice(["99999999999", "00000001", "-1", "٣", "9" * 200, "1e9", " 0"])
    kinds = {
        "consolidated.*.pth": f"consolidated.{number}.pth", "iter_*": f"iter_{number}", "mp_rank_*": f"mp_rank_{number}",
        "mp_rank_00_*": f"mp_rank_00_{number}", "model-*": f"model-00001-of-{number}.safetensors", "__0*": f"__{number}_0.distcp",
        "shard_*": f"shard_{number}_{number}.pt", "*.0.0": f"{number}.0.0", "model_world*": f"model_world_size_{number}_rank_{number}.pt",
        "global_step*": f"global_step{number}", "zero_pp_rank_0*": f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt", "0": number,
    }  # fmt: skip
    found: list[tuple[Path, str]] = []
    for pattern, new in kinds.items():
        for path in sorted(source.rglob(pattern)):
            found.append((path, new))
    if not found:
        return _special(bench, source, random)
    path, new = random.choice(found)
    target = path.with_name(new[:250])
    shown = target.name[:40]
    if target.exists():
        return "nothing"
    if random.random() < 0.5 and path.is_file():
        shutil.copyfile(path, target)
        return f"{path.name} is there as {shown} too"
    path.rename(target)
    return f"{path.name} is called {shown}"


def _tracker(bench: Bench, source: Path, random: Random) -> str:
    """latest_checkpointed_iteration.txt, or an index, names something else."""
    text = random.choice(
        [
            "9" * 5000,
            "../../outside",
            "-1",
            "release",
            "1\n2",
            "\0",
            "1e3",
            "٣",
            "",
            "/etc",
            "0x1",
            " 1 ",
            "99999999999",
        ]
    )
    file = source / "latest_checkpointed_iteration.txt"
    if not file.exists():
        index = next(source.glob("*.index.json"), None)
        if index is None:
            return _special(bench, source, random)
        document = json.loads(index.read_text())
        name = random.choice(list(document["weight_map"]))
        document["weight_map"][name] = random.choice(
            ["../outside/secret", "/etc/passwd", "", ".", "\0", 5, None, "../source/config.json"]
        )
        index.write_text(json.dumps(document))
        return f"the index has {name} in {document['weight_map'][name]!r}"
    file.write_text(text)
    return f"the tracker says {text[:30]!r}"


# Targets.


def _attack_target(bench: Bench, random: Random) -> None:
    """Somebody's files lie where the output would go: all of them are there afterwards, and the command was refused."""
    folder = bench.fresh_folder()
    source = bench.copy("hf")
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.tex").write_text("years of work")
    (folder / "link").symlink_to("precious")
    saver = random.choice([saver for saver in SAVERS if saver not in SOURCES])
    target, staging = random.choice(_TARGETS)
    if staging is not None:
        staging(folder)
    before = snapshot(folder)
    options = random.choice(["--overwrite", "--overwrite --resume"])
    arguments = command(source, folder, SAVERS[saver], options)
    arguments[4] = target
    what = f"--save-dir {target!r}{' (prepared)' if staging else ''} {options}, {saver}"
    outcome = server.run(*arguments, folder=folder)
    check_conduct(outcome, what)
    after = snapshot(folder)
    ours = ".new.megaconv-partial"
    gone = sorted(
        name
        for name, content in before.items()
        if after.get(name) != content and not name.startswith(ours)
    )
    if gone:
        raise Failure(
            "lost", f"{what}: exit {outcome.status}, and {', '.join(gone[:4])} are gone or changed"
        )
    if not outcome.status and not staging:
        raise Failure("wrong", f"{what}: exit 0")


def _staging_is_a_link(folder: Path) -> None:
    (folder / ".new.megaconv-partial").symlink_to("precious")


def _data_is_a_link(folder: Path) -> None:
    (folder / ".new.megaconv-partial").mkdir()
    (folder / ".new.megaconv-partial" / "data").symlink_to("../precious")


_TARGETS: list[tuple[str, Callable[[Path], None] | None]] = [
    ("", None),
    (".", None),
    ("..", None),
    ("./", None),
    ("source", None),
    ("source/..", None),
    ("source/.", None),
    ("precious", None),
    ("precious/.", None),
    ("link", None),
    ("precious/thesis.tex", None),
    ("/", None),
    ("new", _staging_is_a_link),
    ("new", _data_is_a_link),
]
"""(value of --save-dir, preparation of the folder). The working directory is the folder with everything in it."""
