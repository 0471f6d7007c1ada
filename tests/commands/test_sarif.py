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
from tests.runs import assert_refused, run
from tests.signatures.made import write_keys

CI = ROOT / "examples" / "ci"
CODE = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."
"""A pickle that calls a function."""
SCAN = "Scan and verify"
"""The step of the workflow that runs the script."""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with one finding of each kind."""
    monkeypatch.chdir(tmp_path)
    model = write_llama(tmp_path / "my model", layers=1)
    (model / "evil.pkl").write_bytes(CODE)
    (model / "class.pkl").write_bytes(b"\x80\x02cmy.module\nThing\n.")
    (model / "code.py").write_text("print()")
    (model / "damaged.safetensors").write_bytes(b"\0" * 20)
    (model / "custom.json").write_text('{"auto_map": {"AutoModel": "code.Model"}}')
    return Path("my model")


def run_of(file: Path) -> Any:
    """The only run of a document that is valid by the schema."""
    document = json.loads(file.read_bytes())
    Schema.model_validate(document)
    (only,) = document["runs"]
    return only


def results(file: Path) -> list[Any]:
    only = run_of(file)
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
        ("unknown-global", "note", "my%20model/class.pkl"),
        ("damaged-file", "warning", "my%20model/damaged.safetensors"),
        ("remark", "note", "my%20model/code.py"),
    }


def test_a_checkpoint_without_findings_has_no_results(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    file = tmp_path / "out.sarif"
    assert run("scan", model, "--sarif", file).status == 0
    assert results(file) == []


def test_the_findings_of_two_checkpoints_have_two_ids(tmp_path: Path) -> None:
    ids = set()
    for name in ("first", "second"):
        model = write_llama(tmp_path / name / "model", layers=1)
        run("scan", model, "--sarif", tmp_path / "out.sarif")
        ids.add(run_of(tmp_path / "out.sarif")["automationDetails"]["id"])
    assert ids == {f"megaconv{tmp_path}/{name}/model/" for name in ("first", "second")}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (".", "is a directory"),
        ("missing/out.sarif", "no such directory"),
        ("s3://a/b", "is a URI"),
    ],
)
def test_the_place_of_the_findings_is_checked_before_the_scan(
    place: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # If the scan came first, it would report the missing checkpoint.
    assert_refused(run("scan", tmp_path / "no model", "--sarif", place), 2, expected)


def test_only_older_findings_are_replaced(hostile: Path) -> None:
    weights = hostile / "model.safetensors"
    before = weights.read_bytes()
    words = "exists and holds no findings in SARIF"
    assert_refused(run("scan", hostile, "--sarif", weights), 2, words)
    assert weights.read_bytes() == before
    for _ in range(2):
        assert run("scan", hostile, "--sarif", "found.sarif").status == 6


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with the command `megaconv`, for PATH."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "megaconv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megaconv "$@"\n')
    (place / "megaconv").chmod(0o755)
    return place


def check(programs: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The script for CI, with its arguments."""
    return subprocess.run(
        ["bash", str(CI / "check.sh"), *map(str, words)],
        env={"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_script_for_ci_fails_for_code_and_for_a_changed_file(
    hostile: Path, programs: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys")
    good = write_llama(tmp_path / "good", layers=1)
    megaconv.seal(good, key=keys.private)
    assert check(programs, keys.public, "out", good).returncode == 0
    assert results(Path("out/1-good.sarif")) == []
    (good / "added.txt").write_text("x")
    assert check(programs, keys.public, "out", good, hostile).returncode == 1
    assert len(results(Path("out/2-my model.sarif"))) == 5


def test_the_script_for_ci_keeps_the_findings_of_checkpoints_with_the_same_name(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a/model", "b/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/model/evil.pkl").write_bytes(CODE)
    assert check(programs, "-", "out", "a/model", "b/model").returncode == 1
    assert [len(results(file)) for file in sorted(Path("out").iterdir())] == [1, 0]


def test_the_script_for_ci_refuses_a_link_to_another_checkpoint(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this check, a pull request could pass with the signed checkpoint of the main branch."""
    write_llama(tmp_path / "trusted" / "model", layers=1)
    (tmp_path / "proposed").mkdir()
    (tmp_path / "proposed" / "model").symlink_to(tmp_path / "trusted" / "model")
    monkeypatch.chdir(tmp_path / "proposed")
    done = check(programs, "-", tmp_path / "out", "model")
    assert (done.returncode, "model: is not in " in done.stderr) == (1, True)


def workflow() -> Any:
    return yaml.safe_load((CI / "checkpoints.yml").read_text())


def test_the_workflow_takes_its_script_and_its_key_from_the_main_branch() -> None:
    found = workflow()
    events = found[True]  # YAML reads the key `on` as true
    assert "pull_request" not in events  # GitHub would take the workflow from the pull request
    assert events["pull_request_target"] == {"branches": ["main"]}
    steps = found["jobs"]["check"]["steps"]
    trusted, proposed = [each["with"] for each in steps if "checkout" in each.get("uses", "")]
    assert (trusted["path"], trusted["ref"]) == ("trusted", "main")
    assert proposed["path"] == "proposed"
    assert not trusted["persist-credentials"]
    assert not proposed["persist-credentials"]
    (scan,) = [each["run"] for each in steps if "check.sh" in each.get("run", "")]
    assert scan.startswith('bash ../trusted/examples/ci/check.sh "../trusted/$PUBLIC_KEY" ')


def test_the_workflow_runs_nothing_of_the_pull_request(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands, with a pull request that brings its own key, script, findings and Python modules."""
    keys, thief = write_keys(tmp_path / "keys"), write_keys(tmp_path / "thief")
    for name, pair in (("trusted", keys), ("proposed", thief)):
        root = tmp_path / name
        model = write_llama(root / "model", layers=1)
        megaconv.seal(model, key=pair.private)
        (root / "keys").mkdir()
        shutil.copy(pair.public, root / "keys" / "public.pem")
        shutil.copytree(CI, root / "examples" / "ci")
    proposed = tmp_path / "proposed"
    (proposed / "examples" / "ci" / "check.sh").write_text("exit 0")
    (proposed / "json.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(proposed)
    found = workflow()
    (step,) = [each for each in found["jobs"]["check"]["steps"] if each.get("name") == SCAN]
    environment = {name: str(value) for name, value in found["env"].items()}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["RUNNER_TEMP"] = str(tmp_path / "runner")

    def outcome() -> int:
        command = ["bash", "-e", "-c", step["run"]]
        return subprocess.run(command, env=environment, check=False, timeout=60).returncode

    assert outcome() == 1
    megaconv.seal(proposed / "model", key=keys.private, overwrite=True)
    assert outcome() == 0
    assert (tmp_path / "runner" / "findings" / "1-model.sarif").exists()


def test_the_files_for_ci_are_yaml_whose_commands_exist() -> None:
    steps = " ".join(step.get("run", "") for step in workflow()["jobs"]["check"]["steps"])
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
