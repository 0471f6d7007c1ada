"""docs/api.md: each public name is described as it is called, and what is shown there runs."""

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.called import spelled
from tests.conftest import FIXTURES

ROOT = Path(__file__).parents[1]
BUILDER = ROOT / "docs" / "build_reference.py"
REFERENCE = (ROOT / "docs" / "api.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", REFERENCE, re.MULTILINE | re.DOTALL))
FUNCTIONS = [name for name in megaconv.__all__ if callable(getattr(megaconv, name))]
PEFT = FIXTURES / "peft-llama-all-linear"


def blocks(text: str) -> list[str]:
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return found


def signature(name: str) -> str:
    """As the reference has it: an option a line."""
    called = inspect.signature(getattr(megaconv, name))
    lines, starred = list[str](), False
    for each in called.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            lines, starred = [*lines, "*"], True
        stars = "**" if each.kind is each.VAR_KEYWORD else ""
        default = "" if each.default is each.empty else f" = {each.default!r}".replace("'", '"')
        lines.append(f"{stars}{each.name}: {spelled(each.annotation)}{default}")
    listed = "".join(f"    {line},\n" for line in lines)
    return f"megaconv.{name}(\n{listed}) -> {spelled(called.return_annotation)}\n"


def test_every_public_name_has_a_section() -> None:
    assert set(megaconv.__all__) <= SECTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_is_the_packages(name: str) -> None:
    assert blocks(SECTIONS[name])[0] == signature(name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_section_says_of_a_result_is_there(name: str) -> None:
    """The rows of its table: attributes of the class that the function returns."""
    kind = inspect.signature(getattr(megaconv, name)).return_annotation
    fields = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    listed = re.findall(r"^\| `\.(\w+)", SECTIONS[name], re.MULTILINE)
    assert listed
    assert set(listed) <= fields


def test_everything_public_has_a_docstring() -> None:
    assert builder().undocumented() == []


def test_the_reference_of_docstrings_is_built(tmp_path: Path) -> None:
    """As `make docs` builds it, in a process of its own: it puts what is found at first use into the package."""
    pytest.importorskip("pdoc", reason="pdoc is not installed (pip install '.[docs]')")
    subprocess.run([sys.executable, BUILDER, tmp_path], cwd=ROOT, check=True, capture_output=True, timeout=120)
    page = (tmp_path / "megaconv.html").read_text()
    assert all(f'id="{name}"' in page for name in FUNCTIONS)
    assert (tmp_path / "megaconv/errors.html").is_file()


def builder() -> Any:
    """docs/build_reference.py as a module."""
    spec = importlib.util.spec_from_file_location("build_reference", BUILDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the reference and of the README's section, one after the other, as somebody would type it."""
    readme = (ROOT / "README.md").read_text().partition("\n## Python\n")[2].partition("\n## ")[0]
    shown = [block for name in SECTIONS for block in blocks(SECTIONS[name])[name in FUNCTIONS :]]
    assert len(shown) >= len(FUNCTIONS)
    for number, examples in enumerate([shown, blocks(readme)]):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        shutil.copytree(PEFT / "base", "Llama-2-7b")
        shutil.copytree(PEFT / "adapter", "my-adapter")
        known: dict[str, object] = {}
        for example in examples:
            exec(example, known)
