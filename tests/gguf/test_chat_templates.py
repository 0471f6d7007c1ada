"""Chat templates of GGUF files: all that transformers has, as gguf-py writes them, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megaconv.gguf.chat_templates import stored_templates
from tests.conftest import FIXTURES
from tests.gguf.test_gguf import written
from tests.runs import assert_refused, run

SEVERAL = [{"name": "default", "template": "A"}, {"name": "tool use", "template": "B"}]


def source_of(path: Path, template: Any) -> Path:
    shutil.copytree(FIXTURES / "gguf-llama3-bpe" / "hf", path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return path


def templates(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if "chat_template" in name}


@pytest.mark.parametrize("in_files", [False, True])
def test_each_template_has_its_name(in_files: bool, tmp_path: Path) -> None:
    source = source_of(tmp_path / "in", None if in_files else SEVERAL)
    if in_files:
        (source / "chat_template.jinja").write_text("A")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool use.jinja").write_text("B")
    found = templates(written(source, tmp_path / "out").values)
    assert found == {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.chat_templates": ["tool_use"],
    }
    named = [{**each, "name": each["name"].replace(" ", "_")} for each in SEVERAL]
    assert stored_templates(found) == named


def test_one_template_is_the_default_and_stays_a_text(tmp_path: Path) -> None:
    found = templates(written(source_of(tmp_path / "in", "A"), tmp_path / "out").values)
    assert found == {"tokenizer.chat_template": "A"}
    assert stored_templates(found) == "A"
    assert stored_templates({}) is None


def test_templates_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    outcome = run("convert", source_of(tmp_path / "in", ["A"]), tmp_path / "out", "--saver", "gguf")
    assert_refused(outcome, 3, "tokenizer_config.json")
