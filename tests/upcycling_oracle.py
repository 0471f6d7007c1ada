"""Megatron core's own upcycling, run on the CPU, to compare with the experts that megaconv makes.

`python -m tests.upcycling_oracle DENSE MIXTURE...` loads `torch` checkpoints of one rank, lets Megatron core make each
mixture's weights of the dense ones, and prints the names of all weights that differ from each mixture's as JSON.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests import megatron_oracle
from tests.megatron_oracle import read_rank_file, version_directory


def differing_weights(dense: Path, *mixtures: Path) -> list[list[str]]:
    """The weights in which each mixture differs from the one that Megatron core makes of the dense checkpoint."""
    command = [sys.executable, "-m", "tests.upcycling_oracle", str(dense), *map(str, mixtures)]
    outcome = subprocess.run(
        command, cwd=megatron_oracle.REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert outcome.returncode == 0, outcome.stderr
    found: list[list[str]] = json.loads(outcome.stdout.splitlines()[-1])
    return found


def _loaded(checkpoint: Path) -> tuple[Any, Any]:
    """(the arguments, the model) of a checkpoint of one rank."""
    version = version_directory(checkpoint)
    args = read_rank_file(version / "mp_rank_00" / "model_optim_rng.pt")["args"]
    (model,) = megatron_oracle.load_chunks(args, version, further=False)
    return args, model


def _compare(dense: Path, mixture: Path) -> list[str]:
    from megatron.core.transformer.moe.upcycling_utils import upcycle_state_dict

    _, dense_model = _loaded(dense)
    _, mixture_model = _loaded(mixture)
    expected = upcycle_state_dict([mixture_model], [dense_model])["model"]
    found = mixture_model.state_dict()
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    return [
        name
        for name, value in expected.items()
        if value is not None and not torch.equal(value, found[name])
    ]


def main() -> None:
    """Compare the two checkpoints on the command line."""
    megatron_oracle.WORLD = 1
    dense, *mixtures = map(Path, sys.argv[1:])
    args = read_rank_file(version_directory(dense) / "mp_rank_00" / "model_optim_rng.pt")["args"]
    with (
        megatron_oracle.run_on_cpu(),
        TemporaryDirectory() as directory,
        megatron_oracle.process_groups(args, 0, Path(directory) / "rendezvous"),
        torch.no_grad(),
    ):
        print(json.dumps([_compare(dense, mixture) for mixture in mixtures]))


if __name__ == "__main__":
    main()
