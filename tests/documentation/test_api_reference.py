"""docs/api.md: each public name is described as it is called, and what is shown there runs."""

import inspect
import re
import shutil
from pathlib import Path

import pytest

import megaconv
from tests.conftest import FIXTURES
from tests.doc_scripts import script
from tests.signatures.made import write_keys

ROOT = Path(__file__).parents[2]
BUILDER = ROOT / "docs" / "build_reference.py"
REFERENCE = (ROOT / "docs" / "api.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", REFERENCE, re.MULTILINE | re.DOTALL))
FUNCTIONS = [name for name in megaconv.__all__ if callable(getattr(megaconv, name))]
PEFT = FIXTURES / "peft-llama-all-linear"


def blocks(text: str) -> list[str]:
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return found


def test_every_public_name_has_a_section() -> None:
    assert set(megaconv.__all__) <= SECTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_is_the_packages(name: str) -> None:
    """`python docs/build_options.py` writes them."""
    assert blocks(SECTIONS[name])[0] == script("build_options").signature(name)


OWN_RESULTS = [name for name in FUNCTIONS if name != "load_transformers"]
"""Functions that return a class of ours, not a model of transformers."""


@pytest.mark.parametrize("name", OWN_RESULTS)
def test_the_reference_lists_only_real_attributes_of_a_result(name: str) -> None:
    """The rows of its table: attributes of the class that the function returns."""
    kind = inspect.signature(getattr(megaconv, name)).return_annotation
    fields = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}
    listed = re.findall(r"^\| `\.(\w+)", SECTIONS[name], re.MULTILINE)
    assert listed
    assert set(listed) <= fields


def test_everything_public_has_a_docstring() -> None:
    assert script("build_reference").undocumented() == []


def test_the_reference_has_every_public_name_and_the_help_of_every_command() -> None:
    pages = script("build_reference").pages()
    headings = set(re.findall(r"^## (.+)$", "\n".join(pages.values()), re.MULTILINE))
    commands = re.findall(
        r"^\| `megaconv ([\w-]+)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE
    )
    assert {*FUNCTIONS, "CheckpointError", "LazyTensor"} <= headings
    assert {f"megaconv {command}" for command in commands} <= headings
    assert "Usage: megaconv convert" in pages["reference/commands.md"]


def test_the_examples_of_the_reference_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        write_keys(place)
        known: dict[str, object] = {}
        for example in examples:
            exec(example, known)
