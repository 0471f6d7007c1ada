"""The page to try a model, in a real browser where there is one: what a user types is continued, and nobody else is asked."""

from pathlib import Path

import pytest

from megatron_lite.inference.batching import Request, generate
from megatron_lite.inference.prompts import encode
from megatron_lite.inference.sampling import Sampling
from tests.browsers import browser, page
from tests.trainer.inference.conversations import save
from tests.trainer.inference.serving import KEY, Serving, opened

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `serve`)")

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

RECORD = """
window.seen = [];
new MutationObserver(() => seen.push(document.getElementById("answer").textContent.length))
  .observe(document.getElementById("answer"), {childList: true, characterData: true, subtree: true});
document.getElementById("temperature").value = "0";
document.getElementById("tokens").value = "12";
document.getElementById("prompt").focus();
"""


def test_what_is_typed_is_continued_as_it_is_made_and_no_request_leaves_the_server(
    tmp_path: Path,
) -> None:
    browser()
    save(tmp_path)
    alone = opened(tmp_path)
    prompt = encode(alone.tokenizer, "Hello <b>you</b>")
    (answer,) = generate(alone.model, [Request(prompt, 12, Sampling(0), alone.stop_ids)])
    kept = answer.tokens[:-1] if answer.end == "stop" else answer.tokens
    serving = Serving(tmp_path)
    with page(tmp_path) as shown:
        shown.open(serving.url)
        shown.run(RECORD)
        shown.type("Hello <b>you</b>")
        shown.run("document.querySelector('#form button').click()")
        shown.wait("document.getElementById('error').textContent !== ''")
        assert "key is missing" in shown.run("document.getElementById('error').textContent")
        shown.run("document.getElementById('key').focus()")
        shown.type(KEY)
        shown.run("window.seen = []; document.querySelector('#form button').click()")
        shown.wait("seen.length > 1 && document.getElementById('stop').disabled")
        assert shown.run("document.getElementById('error').textContent") == ""
        text = "Hello <b>you</b>" + alone.tokenizer.detokenize(kept)
        assert shown.run("document.getElementById('answer').textContent") == text
        lengths = shown.run("seen")
        assert len(set(lengths)) >= 3, "the answer came at once"
        assert lengths == sorted(lengths)
        shown.run(
            "document.getElementById('tokens').value = '70'; document.querySelector('#form button').click()"
        )
        shown.run("document.getElementById('stop').click()")
        shown.wait("document.getElementById('stop').disabled")
        serving.settle()
        assert shown.asked
        assert all(address.startswith(serving.url) for address in shown.asked), shown.asked
    assert serving.end() == (0, "")
