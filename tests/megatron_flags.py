"""Flags of Megatron-LM's own parsers: tests/fixtures/megatron_flags.json, for `inspect --megatron-args`.

    python tests/megatron_flags.py ~/Megatron-LM core_v0.15.3 core_v0.16.1 ...

Each release's parser is made by Megatron-LM's code (which needs torch, six, einops, triton and pydantic to be imported) and
its actions are listed; of all its flags those are kept that megaconv can write.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "fixtures" / "megatron_flags.json"

_LIST_FLAGS = """
import argparse, json, sys, typing
typing.override = getattr(typing, "override", lambda function: function)  # exists from Python 3.12 on
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
found = {}
for action in parser._actions:
    for flag in action.option_strings:
        found[flag] = {
            "dest": action.dest, "kind": type(action).__name__.strip("_").removesuffix("Action"), "nargs": action.nargs,
            "type": getattr(action.type, "__name__", None), "choices": action.choices and [str(one) for one in action.choices],
        }
json.dump(found, sys.stdout)
"""

_LISTS = ("moe_freq_type", "no_rope_freq_type", "la_freq_type")
"""Types of Megatron-LM's own: a number, or a list as Python writes it."""


def read_release(checkout: Path, release: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(checkout), "archive", release, "megatron"],
            check=True,
            capture_output=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        listed = subprocess.run(
            [sys.executable, "-c", _LIST_FLAGS],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        found: dict[str, Any] = json.loads(listed.stdout.splitlines()[-1])
        return found


def parser_of(flags: Mapping[str, Any]) -> ArgumentParser:
    """A parser that takes these flags as Megatron-LM's does. Ends the process for any other, as argparse does."""
    parser = ArgumentParser(allow_abbrev=False)
    for flag, given in flags.items():
        if given["kind"] in ("StoreTrue", "StoreFalse"):
            parser.add_argument(
                flag,
                dest=given["dest"],
                action="store_true" if given["kind"] == "StoreTrue" else "store_false",
            )
        else:
            parser.add_argument(
                flag,
                dest=given["dest"],
                type=_type(given["type"]),
                choices=_choices(given),
                nargs=given["nargs"],
            )
    return parser


def _choices(given: Mapping[str, Any]) -> list[str] | None:
    return given["choices"] if given["type"] in (None, "str") else None


def _type(name: str | None) -> Any:
    if name in _LISTS:
        return json.loads
    if name == "tuple_type":
        return lambda text: tuple(int(number) for number in text.split(","))
    return {"int": int, "float": float}.get(name or "", str)


def main(checkout: str, *releases: str) -> None:
    from megaconv.megatron.arguments.command_line import known_flags

    wanted = known_flags()
    found = {}
    for release in releases:
        listed = read_release(Path(checkout).expanduser(), release)
        found[release] = {flag: listed[flag] for flag in sorted(wanted & listed.keys())}
    lines = ",\n".join(
        f'"{release}": {{\n'
        + ",\n".join(f" {json.dumps(flag)}: {json.dumps(given)}" for flag, given in flags.items())
        + "\n}"
        for release, flags in found.items()
    )
    FILE.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
