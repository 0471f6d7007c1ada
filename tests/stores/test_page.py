"""The converter's commands of docs/how-to/object-stores.md, against moto. test_trainer.py trains with a store."""

from pathlib import Path

import pytest

from tests.conftest import FIXTURES
from tests.documentation.test_documentation import ROOT
from tests.documented_commands import commands_of, in_bash, shell_environment
from tests.runs import run
from tests.stores.conftest import put
from tests.stores.proxy import Proxy

PAGE = ROOT / "docs/how-to/object-stores.md"


@pytest.mark.slow
def test_the_commands_of_the_page_run(store: Proxy, tmp_path: Path) -> None:
    llama = FIXTURES / "peft-llama-all-linear/base"
    assert run("convert", llama, tmp_path / "run", "--saver", "core", "--tp", 2).status == 0
    put(store, tmp_path / "run", "run")
    (tmp_path / "programs").mkdir()
    environment = shell_environment(tmp_path / "programs")
    commands = [each.text for each in commands_of(PAGE) if not each.text.startswith("torchrun")]
    printed = [in_bash(text, tmp_path, environment, 120) for text in commands]
    assert printed[-1] == printed[-2], "the fingerprints differ"
