"""`benchmarks/forward.py` runs, and its two ways compute the same logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "forward.py"


@pytest.mark.slow
def test_the_benchmark_of_a_forward_pass_finds_the_same_logits() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--rounds", "1", "--json"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(ended.stdout)
    assert found["difference"] < 1e-5
    for way in ("megaconv", "transformers"):
        assert found[way]["anonymous_bytes"] > 0
        assert found[way]["processor_seconds"] > 0
