"""Images in the chat of the server, in a real browser where there is one: chosen, dropped, taken out, answered."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browsers import Page, fits, shown
from tests.trainer.inference.serving import KEY, Serving
from tests.trainer.multimodal import create, write_chats

for package in ("starlette", "uvicorn", "PIL.Image"):
    pytest.importorskip(package, reason=f"{package} is not installed (extras `serve`, `images`)")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SETTINGS = """
document.getElementById("temperature").value = "0";
document.getElementById("max_tokens").value = "6";
"""
HAND_OVER = """
(() => {
  const bytes = Uint8Array.from(atob("%(content)s"), each => each.charCodeAt(0));
  const held = new DataTransfer();
  held.items.add(new File([bytes], "%(name)s", {type: "%(kind)s"}));
  %(give)s
})()
"""
CHOOSE = (
    'const input = document.getElementById("files"); input.files = held.files; input.onchange();'
)
DROP = "document.ondrop({preventDefault() {}, dataTransfer: held});"
PASTE = 'document.getElementById("prompt").onpaste({preventDefault() {}, clipboardData: held});'
LATEST = "document.querySelector('article:last-child p').textContent"


@pytest.fixture(scope="module")
def directory(browser: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    create("qwen2_5_vl", path / "hf")
    write_chats(path / "data")
    return path


@pytest.fixture(scope="module")
def serving(directory: Path) -> Iterator[Serving]:
    running = Serving(directory / "hf", "--dtype", "fp32", "--slots", "2")
    yield running
    assert running.end()[0] == 0


@pytest.fixture
def tab(serving: Serving, browser: Page) -> Iterator[Page]:
    browser.asked.clear()
    browser.complaints.clear()
    browser.resize(1100, 800)
    browser.open(serving.url)
    browser.wait("document.getElementById('error').textContent.includes('key is missing')")
    browser.run("document.getElementById('key').focus()")
    browser.type(KEY)
    browser.run("document.getElementById('key').blur()")
    browser.wait("!document.getElementById('add').hidden")
    browser.run(SETTINGS)
    yield browser
    # The images are in the page itself.
    assert all(address.startswith((serving.url, "data:image/png")) for address in browser.asked)
    assert [each for each in browser.complaints if "401" not in each] == []


def give(tab: Page, path: Path, way: str, kind: str = "image/png") -> None:
    content = base64.b64encode(path.read_bytes()).decode()
    tab.run(HAND_OVER % {"content": content, "name": path.name, "kind": kind, "give": way})


def pending(tab: Page, count: int) -> None:
    """Wait until the next message has so many images."""
    tab.wait(f"document.querySelectorAll('#images img').length === {count}")


def answer(tab: Page, text: str) -> str:
    if text:
        tab.run("document.getElementById('prompt').focus()")
        tab.type(text)
    tab.run("document.getElementById('send').click()")
    tab.wait("!document.getElementById('again').hidden")
    return str(tab.run(LATEST))


def expected(serving: Serving, messages: list[Any]) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 6}
    status, found = serving.ask("/v1/chat/completions", body)
    assert status == 200, found
    return str(found["choices"][0]["message"]["content"])


def asked(directory: Path, names: list[str], text: str) -> Any:
    urls = [base64.b64encode((directory / "data" / name).read_bytes()).decode() for name in names]
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls
    ]
    if text:
        parts.append({"type": "text", "text": text})
    return {"role": "user", "content": parts}


def test_images_are_chosen_dropped_pasted_and_answered(
    tab: Page, directory: Path, serving: Serving
) -> None:
    data = directory / "data"
    for count, way in enumerate((CHOOSE, DROP, PASTE), 1):
        give(tab, data / f"{count}.png", way)
        pending(tab, count)
    assert fits(tab)
    tab.run("document.querySelector('#images button').click()")
    pending(tab, 2)
    first = answer(tab, "what?")
    question = asked(directory, ["2.png", "3.png"], "what?")
    assert first == expected(serving, [question])
    assert tab.run("document.querySelectorAll('article.user img').length") == 2
    pending(tab, 0)
    # The next turn shows the same images again, and an image needs no text.
    give(tab, data / "0.png", CHOOSE)
    pending(tab, 1)
    turns = [question, {"role": "assistant", "content": first}, asked(directory, ["0.png"], "")]
    assert answer(tab, "") == expected(serving, turns)
    tab.run("document.getElementById('new').click()")
    assert tab.run("document.querySelectorAll('img').length") == 0


def test_what_is_no_image_is_refused_by_name(tab: Page, directory: Path) -> None:
    give(tab, directory / "data" / "chats.jsonl", CHOOSE, "application/json")
    tab.wait("document.getElementById('error').textContent === 'chats.jsonl is no image'")
    pending(tab, 0)


def test_a_continued_text_has_no_images(tab: Page, directory: Path) -> None:
    give(tab, directory / "data" / "0.png", CHOOSE)
    pending(tab, 1)
    tab.run("document.getElementById('mode').value = 'text'; document.getElementById('mode').onchange()")  # fmt: skip
    assert not shown(tab, "#add")
    tab.run("document.getElementById('send').click()")
    error = "document.getElementById('error').textContent"
    assert tab.run(error) == "a continued text has no images: take them out, or choose the chat"
    pending(tab, 1)
    tab.run("document.getElementById('mode').value = 'chat'; document.getElementById('mode').onchange()")  # fmt: skip
    assert answer(tab, "hello")
    tab.run("document.getElementById('mode').value = 'text'; document.getElementById('mode').onchange()")  # fmt: skip
    answer(tab, "and")
    tab.wait(f"{error} === 'a continued text has no images: start a new chat'")


def test_a_refused_image_goes_back_into_the_form(tab: Page, directory: Path) -> None:
    path = directory / "broken.png"
    path.write_bytes(b"no image")
    give(tab, path, CHOOSE)
    pending(tab, 1)
    tab.run("document.getElementById('prompt').focus()")
    tab.type("what?")
    tab.run("document.getElementById('send').click()")
    tab.wait("document.getElementById('error').textContent.includes('read as an image')")
    pending(tab, 1)
    assert tab.run("document.getElementById('prompt').value") == "what?"
    tab.run("document.querySelector('#images button').click()")
    assert answer(tab, "")
    tab.complaints[:] = [each for each in tab.complaints if "400" not in each]


def test_an_image_that_is_read_late_is_not_in_the_message_before(
    tab: Page, directory: Path
) -> None:
    give(
        tab,
        directory / "data" / "0.png",
        f"{CHOOSE} document.getElementById('prompt').value = 'hello'; at('send').click();",
    )
    pending(tab, 1)
    assert tab.run("turns[0].images.length") == 0


def test_the_card_says_that_images_are_read(tab: Page) -> None:
    assert "imagesyes" in tab.run("document.getElementById('facts').textContent")
