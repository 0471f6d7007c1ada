"""The chat of the server, in a real browser where there is one: it streams, stops, regenerates, and asks nobody else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.inference.batching import generate
from megatron_lite.inference.prompts import encode, encode_chat
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from tests.browsers import PHONE, Page, fits, shown
from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import KEY, Serving, opened

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `serve`)")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

HOSTILE = "<img src> <b>"
SETTINGS = """
window.seen = [];
new MutationObserver(() => seen.push(document.querySelector("article:last-child p")?.textContent.length ?? 0))
  .observe(document.getElementById("log"), {childList: true, characterData: true, subtree: true});
document.getElementById("temperature").value = "0";
document.getElementById("max_tokens").value = "12";
"""


@pytest.fixture(scope="module")
def directory(browser: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path)
    return path


@pytest.fixture(scope="module")
def serving(directory: Path) -> Iterator[Serving]:
    running = Serving(directory)
    yield running
    assert running.end() == (0, "")


@pytest.fixture
def tab(serving: Serving, browser: Page) -> Iterator[Page]:
    """The page with its key given. At the end, it has asked this server alone."""
    browser.asked.clear()
    browser.complaints.clear()
    browser.resize(1100, 800)
    browser.prefer("light")
    browser.open(serving.url)
    browser.wait("document.getElementById('error').textContent.includes('key is missing')")
    browser.run("document.getElementById('key').focus()")
    browser.type(KEY)
    browser.run("document.getElementById('key').onchange()")
    browser.wait("document.getElementById('error').hidden")
    browser.run(SETTINGS)
    yield browser
    assert browser.asked
    assert all(address.startswith(serving.url) for address in browser.asked)
    # The console reports the first request, which had no key.
    assert [each for each in browser.complaints if "401" not in each] == []


def say(tab: Page, text: str) -> None:
    tab.run("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.run("document.getElementById('send').click()")


def ended(tab: Page) -> str:
    """The last answer, when it is complete."""
    tab.wait("!document.getElementById('again').hidden")
    return str(tab.run("document.querySelector('article:last-child p').textContent"))


def expected(directory: Path, messages: list[dict[str, str]] | None = None, text: str = "") -> str:
    """The answer that the model gives without a server, with temperature 0 and 12 tokens."""
    alone = opened(directory)
    prompt = encode(alone.tokenizer, text) if messages is None else encode_chat(alone.tokenizer, messages)  # fmt: skip
    (answer,) = generate(alone.model, [Request(prompt, 12, Sampling(0), alone.stop_ids)])
    kept = answer.tokens[:-1] if answer.end == "stop" else answer.tokens
    return str(alone.tokenizer.detokenize(kept))


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_answers_stream_by_the_models_template_and_no_request_leaves_the_server(
    tab: Page, directory: Path
) -> None:
    tab.run("document.getElementById('system').value = 'Be kind.'")
    say(tab, HOSTILE)
    first = ended(tab)
    system, asked = message("system", "Be kind."), message("user", HOSTILE)
    assert first == expected(directory, [system, asked])
    lengths = tab.run("seen")
    assert len(set(lengths)) >= 3, "the answer came at once"
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE in tab.run("document.querySelector('article.user').textContent")
    assert "12 tokens" in tab.run("document.querySelector('article:last-child footer').textContent")
    say(tab, "And you?")
    turns = [system, asked, message("assistant", first), message("user", "And you?")]
    assert ended(tab) == expected(directory, turns)
    assert tab.run("document.querySelectorAll('article').length") == 4
    tab.run("document.getElementById('new').click()")
    assert tab.run("document.querySelectorAll('article').length") == 0


def test_a_regenerated_answer_replaces_the_last_one(tab: Page) -> None:
    say(tab, "Hello")
    first = ended(tab)
    tab.run("document.getElementById('again').click()")
    assert ended(tab) == first
    assert tab.run("document.querySelectorAll('article').length") == 2
    tab.run("document.getElementById('temperature').value = '5'")
    tab.run("document.getElementById('seed').value = '3'")
    tab.run("document.getElementById('again').click()")
    assert ended(tab) != first


def test_a_stopped_answer_stays_and_frees_its_slot(tab: Page, serving: Serving) -> None:
    tab.run("document.getElementById('max_tokens').value = '70'")
    say(tab, "Hello")
    tab.run("document.getElementById('stop').click()")
    ended(tab)
    assert "stopped" in tab.run("document.querySelector('article:last-child footer').textContent")
    serving.settle()


def test_a_text_is_continued_without_a_template(tab: Page, directory: Path) -> None:
    tab.run("document.getElementById('mode').value = 'text'; document.getElementById('mode').onchange()")  # fmt: skip
    assert not shown(tab, "#system")
    say(tab, "Hello")
    assert ended(tab) == expected(directory, text="Hello")


def test_a_refused_request_is_named_and_can_be_repeated(tab: Page) -> None:
    tab.run("document.getElementById('top_p').value = '7'")
    say(tab, "Hello")
    ended_with = "document.getElementById('error').textContent"
    tab.wait(f"{ended_with} !== ''")
    assert "top_p" in tab.run(ended_with)
    tab.run("document.getElementById('top_p').value = '1'")
    tab.run("document.getElementById('again').click()")
    assert ended(tab)
    assert tab.run("document.getElementById('error').hidden")
    tab.complaints[:] = [each for each in tab.complaints if "400" not in each]


def test_a_phone_and_a_dark_screen_show_the_chat_and_the_card(tab: Page) -> None:
    facts = tab.run("document.getElementById('facts').textContent")
    assert "familyllama" in facts
    assert "chat templateyes" in facts
    tab.resize(*PHONE)
    tab.prefer("dark")
    assert fits(tab)
    tab.run("for (const each of document.querySelectorAll('details')) each.open = false")
    for part in ("#title", "#prompt", "#send", "#settings summary", "#log"):
        assert shown(tab, part), part
    background = "getComputedStyle(document.body).backgroundColor"
    assert tab.run(background) == "rgb(20, 23, 27)"
    tab.run("document.getElementById('theme').click()")
    assert tab.run(background) == "rgb(255, 255, 255)"
