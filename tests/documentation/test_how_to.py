"""The pages of docs/how-to: every command in a `console` or `sh` block runs, without a network and without a GPU.

A page uses other fences (`bash`, `python`) for commands that need a network, several machines or another program.
"""

import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.documentation.test_documentation import ROOT, anchors, links
from tests.documented_commands import (
    Command,
    commands_of,
    in_bash,
    run_documented,
    shell_environment,
)

HOW_TO = ROOT / "docs" / "how-to"
PAGES = sorted(HOW_TO.glob("*.md"))
SECTIONS = ("What you need", "Steps", "Check the result", "What commonly goes wrong", "Read more")
CONVERTING = (
    "convert-for-vllm-and-llama-cpp.md",
    "publish-to-the-hub.md",
    "sign-a-checkpoint.md",
)
SERVING = "serve-without-converting.md"
TRAINING = {
    "finetune": ("finetune-llama.md", "serve-a-tuned-model.md"),
    "continue": ("continue-a-megatron-run.md",),
    "tokens": ("add-tokens.md",),
    "layers": ("shrink-a-model.md",),
    "experts": ("leave-experts-out.md",),
    "channels": ("make-a-model-narrower.md",),
    "machines": ("train-on-several-machines.md",),
}
"""Pages that share a directory: the second page uses the files of the first."""


def commands(page: str) -> list[Command]:
    """The commands of a page that a test runs."""
    return [command for command in commands_of(HOW_TO / page) if command.language != "bash"]


def fingerprints(page: str) -> set[str]:
    """The shortened fingerprints that the page's console blocks show."""
    blocks = re.findall(r"^```console\n(.*?)^```", (HOW_TO / page).read_text(), re.DOTALL | re.M)
    return set(re.findall(r"fingerprint ([0-9a-f]{8})…", "".join(blocks)))


def rounding(page: str) -> list[str]:
    """The lines about rounded weights that the page's console blocks show."""
    return re.findall(r"^quantized +.+$", (HOW_TO / page).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return shell_environment(tmp_path_factory.mktemp("programs"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        there = (page.parent / path) if path else page
        assert there.exists(), path
        assert not anchor or anchor in anchors(there), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_goal_and_all_sections(page: Path) -> None:
    text = page.read_text()
    assert "\n**Goal:** " in text
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert [heading for heading in headings if heading in SECTIONS] == list(SECTIONS)


def test_every_page_is_run() -> None:
    run_by_a_test = {*CONVERTING, *(page for pages in TRAINING.values() for page in pages)}
    run_by_a_test.add(SERVING)
    run_by_a_test.add("object-stores.md")  # tests/stores/test_page.py runs it with a store
    assert {page.name for page in PAGES} == run_by_a_test
    assert all(commands(page) for page in run_by_a_test)


@pytest.mark.parametrize("page", CONVERTING)
def test_the_commands_of_a_page_about_converting_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: dict[str, str]
) -> None:
    """Single commands of megaconv run in this process, which saves most of the time; the fingerprints and the rounding are those shown."""
    monkeypatch.chdir(tmp_path)
    printed = "".join(run_documented(command, tmp_path, shell, 60) for command in commands(page))
    assert fingerprints(page)
    for shown in (*fingerprints(page), *rounding(page)):
        assert shown in printed


def test_the_commands_of_the_page_about_serving_checkpoints_run(
    tmp_path: Path, shell: dict[str, str]
) -> None:
    """All commands run in one shell: one starts a server, and the next ones ask it."""
    script = "\n".join(command.text for command in commands(SERVING))
    script = script.replace("8700", str(free_port()))
    try:
        in_bash(f"{script}\nkill %1", tmp_path, shell | {"HF_HUB_OFFLINE": "0"}, 300)
    finally:
        print((tmp_path / "server.log").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("pages", TRAINING.values(), ids=TRAINING.keys())
def test_the_commands_of_pages_about_training_run(
    pages: tuple[str, ...], tmp_path: Path, shell: dict[str, str]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the page about serving needs curl")
    for page in pages:
        script = "\n".join(command.text for command in commands(page))
        for port in ("8000", "29400"):
            script = script.replace(f"localhost:{port}", f"localhost:{(free := free_port())}")
            script = script.replace(f"--port {port}", f"--port {free}")
        in_bash(script, tmp_path, shell, 900)
