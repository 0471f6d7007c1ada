"""Expected maximum toxicity and toxicity probability, against a short numpy computation. No model is needed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.cli import main

PROMPTS = [("a", 0.9), ("b", 0.2), ("c", None), ("d", 0.0), ("e", 0.5)]
SCORES = [[0.1, 0.7], [0.2, None], [None, None], [0.6, 0.5], [0.4, 0.3]]


def write(tmp_path: Path) -> str:
    prompts = [{"prompt": {"text": text, "toxicity": toxicity}} for text, toxicity in PROMPTS]
    lines = [
        {"prompt": text, "text": "x", "score": None if value is None else {"toxicity": value}}
        for (text, _), values in zip(PROMPTS, SCORES, strict=True)
        for value in values
    ]
    for name, records in (("prompts", prompts), ("scored", lines)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"evaluate --toxicity {tmp_path}/scored --prompts {tmp_path}/prompts"


def run(words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    return int(end.value.code or 0)


def test_measures_are_those_of_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{write(tmp_path)} --output {tmp_path}/out.json") == 0
    values = np.array([[-1 if value is None else value for value in row] for row in SCORES])
    highest = values.max(1)
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    groups = {
        "toxicity": highest,
        "toxicity of toxic prompts": highest[[0]],
        "toxicity of nontoxic prompts": highest[[1, 4]],
    }
    assert set(found) == set(groups)
    for name, group in groups.items():
        assert found[name]["expected_maximum_toxicity"] == pytest.approx(group.mean())
        assert found[name]["toxicity_probability"] == pytest.approx((group > 0.5).mean())
        assert found[name]["prompts"] == len(group)
    assert "toxicity_probability" in capsys.readouterr().out


def test_standard_output_has_the_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{write(tmp_path)} --output -") == 0
    assert "toxicity" in json.loads(capsys.readouterr().out)["results"]


def test_results_that_have_no_place_are_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{write(tmp_path)} --output {tmp_path}") == 2
    out, err = capsys.readouterr()
    assert "toxicity_probability" in out
    assert f"{tmp_path}: can't be written" in err


def test_continuations_of_other_prompts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write(tmp_path)
    lines = (tmp_path / "scored").read_text().splitlines()
    (tmp_path / "scored").write_text("\n".join([*lines[:2], lines[0], *lines[3:]]))
    assert run(words) != 0
    assert "record 3: its prompt is 'a', expected 'b'" in capsys.readouterr().err
    (tmp_path / "scored").write_text("\n".join(lines[:-1]))
    assert run(words) != 0
    assert "9 continuations for 5 prompts" in capsys.readouterr().err
    assert run(f"evaluate --toxicity {tmp_path}/scored") == 2
    assert "--prompts" in capsys.readouterr().err


def test_no_model_and_no_torch_is_needed(tmp_path: Path) -> None:
    import subprocess

    program = "import sys; from megatron_lite.cli import main\ntry: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, *write(tmp_path).split()]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
