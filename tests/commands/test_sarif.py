"""`megaconv scan --sarif`: valid by the schema of SARIF 2.1.0, and the examples for CI that use it.

pydantic-sarif was generated from the published schema, and refuses unknown keys.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Schema

import megaconv
from formats.pickle_scan import UNSAFE
from tests.models import write_llama
from tests.package.test_architecture import ROOT
from tests.runs import run
from tests.signatures.made import write_keys

CI = ROOT / "examples" / "ci"
CODE = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."
"""A pickle that calls a function."""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with one finding of each kind."""
    monkeypatch.chdir(tmp_path)
    model = write_llama(tmp_path / "my model", layers=1)
    (model / "evil.pkl").write_bytes(CODE)
    (model / "code.py").write_text("print()")
    (model / "damaged.safetensors").write_bytes(b"\0" * 20)
    (model / "custom.json").write_text('{"auto_map": {"AutoModel": "code.Model"}}')
    return Path("my model")


def results(file: Path) -> list[Any]:
    document = json.loads(file.read_bytes())
    Schema.model_validate(document)
    (only,) = document["runs"]
    rules = [rule["id"] for rule in only["tool"]["driver"]["rules"]]
    for each in only["results"]:
        assert rules[each["ruleIndex"]] == each["ruleId"]
    return list(only["results"])


def test_every_finding_is_a_result_with_the_place_of_its_file(hostile: Path) -> None:
    assert megaconv.scan(hostile).unsafe[0].judgement == UNSAFE
    outcome = run("scan", hostile, "--sarif", "out.sarif", "--quiet")
    assert outcome.status == 6
    found = {
        (
            each["ruleId"],
            each["level"],
            each["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
        )
        for each in results(Path("out.sarif"))
    }
    assert found == {
        ("unsafe-pickle", "error", "my%20model/evil.pkl"),
        ("unsafe-content", "error", "my%20model/custom.json"),
        ("damaged-file", "warning", "my%20model/damaged.safetensors"),
        ("remark", "note", "my%20model/code.py"),
    }


def test_a_checkpoint_without_findings_has_no_results(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    file = tmp_path / "out.sarif"
    assert run("scan", model, "--sarif", file).status == 0
    assert results(file) == []


def test_the_script_for_ci_fails_for_code_and_for_a_changed_file(
    hostile: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys")
    good = write_llama(tmp_path / "good", layers=1)
    megaconv.seal(good, key=keys.private)
    programs = tmp_path / "bin"
    programs.mkdir()
    program = f'#!/bin/sh\nexec "{sys.executable}" -m megaconv "$@"\n'
    (programs / "megaconv").write_text(program)
    (programs / "megaconv").chmod(0o755)
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def check(*checkpoints: Path) -> int:
        command = ["bash", str(CI / "check.sh"), str(keys.public), *map(str, checkpoints)]
        done = subprocess.run(command, env=paths, capture_output=True, check=False, timeout=60)
        return done.returncode

    assert check(good) == 0
    assert results(Path("sarif/good.sarif")) == []
    (good / "added.txt").write_text("x")
    assert check(good, hostile) == 1
    assert len(results(Path("sarif/my model.sarif"))) == 4


def test_the_files_for_ci_are_yaml_whose_commands_exist() -> None:
    workflow = yaml.safe_load((CI / "checkpoints.yml").read_text())
    steps = " ".join(step.get("run", "") for step in workflow["jobs"]["check"]["steps"])
    assert "examples/ci/check.sh" in steps
    assert "diff" in steps
    hooks = yaml.safe_load((CI / "pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [
        "megaconv scan",
        "megaconv verify",
        "megaconv diff",
    ]
    for hook in hooks:
        command = hook["entry"].split()[1]
        known = run(command, "--help").out
        assert all(word in known for word in hook["args"] if word.startswith("--"))


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_is_valid_for_bash() -> None:
    subprocess.run(["bash", "-n", str(CI / "check.sh")], check=True)
