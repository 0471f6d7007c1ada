"""Images in prompts: the logits of transformers' whole model, in parts and behind other rows."""

import base64
import io
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megaconv.errors import TensorMismatch, UsageError
from megatron_lite.cli import main
from megatron_lite.data.images.files import ImageFile
from megatron_lite.inference import shown_images
from megatron_lite.inference.batching import RunningBatch, steps
from megatron_lite.inference.commands.generate import parser
from megatron_lite.inference.conversation import Conversation
from megatron_lite.inference.gallery import Picture
from megatron_lite.inference.image_tokens import FIRST, runs_of, tokens_of
from megatron_lite.inference.opening import Opened, open_model
from megatron_lite.inference.prompts import encode_chat
from megatron_lite.inference.requests import Request
from megatron_lite.inference.sampling import Sampling
from megatron_lite.inference.server.command import loaded
from megatron_lite.inference.slots import Feed
from megatron_lite.objectives.image_encoder import ImageEncoder
from megatron_lite.processes import launch
from megatron_lite.settings.parallel import Parallel
from tests.trainer.image_texts import WORD, shown
from tests.trainer.inference.illustrated import FOLLOWING, NAMES, PROMPT, in_layout
from tests.trainer.inference.models import tiny
from tests.trainer.inference.serving import ForkedServing
from tests.trainer.loop.whole_models import load_whole
from tests.trainer.multimodal import MODELS, PLACEHOLDERS, create, token, tokenizer, write_chats
from tests.trainer.parallel.worlds import World
from tests.trainer.special_tokens import BORDERS

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle


class Case(NamedTuple):
    """A model with a prompt that shows two images."""

    opened: Opened
    prompt: tuple[int, ...]
    ids: list[int]
    """The prompt as transformers has it."""
    logits: Tensor
    """[prompt and following tokens, vocabulary]: of transformers."""
    pictures: Sequence[Picture]


def opened_model(directory: Path) -> Opened:
    given = parser().parse_args(["--load", str(directory), "--dtype", "fp32", "--slots", "3"])
    given.training = None
    return open_model(given, Parallel(), launch.start(Parallel()))


def arguments_of_transformers(
    kind: str, directory: Path, messages: Sequence[Any], names: Sequence[str]
) -> tuple[list[int], dict[str, Any]]:
    """(tokens of a prompt, the arguments of its images)."""
    import transformers
    from PIL import Image

    hf = directory / "hf"
    own_tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    processor = transformers.AutoImageProcessor.from_pretrained(hf)
    images = [Image.open(directory / "data" / name) for name in names]
    arguments, written = shown(kind, images, processor, transformers)
    text = own_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    first, *others = text.split(PLACEHOLDERS.get(kind, WORD))
    text = first + "".join(map("".join, zip(written, others, strict=True)))
    return own_tokenizer(text, add_special_tokens=False)["input_ids"], arguments


def of_transformers(kind: str, directory: Path) -> tuple[list[int], Tensor]:
    """(tokens of the prompt, logits behind each of its tokens and of those that follow)."""
    model = load_whole(directory)
    ids, arguments = arguments_of_transformers(kind, directory, PROMPT, NAMES)
    row = torch.tensor([[*ids, *FOLLOWING]])
    kinds = (row == token(WORD)).int()
    arguments |= {"input_ids": row, "mm_token_type_ids": kinds, "token_type_ids": kinds}
    known = signature(model.forward).parameters
    taken = {name: value for name, value in arguments.items() if name in known}
    with torch.no_grad():
        return ids, model(**taken).logits[0]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    create(request.param, directory / "hf")
    write_chats(directory / "data")
    ids, logits = of_transformers(request.param, directory)
    opened = opened_model(directory / "hf")
    files = [ImageFile(directory / "data" / name) for name in NAMES]
    pictures = [opened.images.add(file, several=True) for file in files]
    prompt = encode_chat(opened.tokenizer, PROMPT, pictures=pictures)
    return Case(opened, prompt, ids, logits, pictures)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_prompt_has_the_tokens_of_transformers(case: Case) -> None:
    """The tokens around Ovis2's tiles have vectors of the encoder too, so the trainer has its token of images there."""
    borders = [token(name) for name in BORDERS]
    expected = [token(WORD) if each in borders else each for each in case.ids]
    assert [token(WORD) if each >= FIRST else each for each in case.prompt] == expected


def test_logits_are_those_of_transformers(case: Case) -> None:
    """Behind the prompt, and behind further tokens one after the other."""
    model, start = case.opened.model, len(case.prompt)
    assert_near(model.extend([Feed(0, 0, case.prompt)])[0], case.logits[start - 1])
    for place, each in enumerate(FOLLOWING, start):
        assert_near(model.extend([Feed(0, place, (each,))])[0], case.logits[place])


def test_a_prompt_in_parts_beside_other_rows_gives_the_same(case: Case) -> None:
    """A part may end within an image. Another row has no image, or the images in another slot."""
    model, start = case.opened.model, len(case.prompt)
    middle = next(n for n, each in enumerate(case.prompt) if each >= FIRST)
    middle += 0 if case.pictures[0].is_whole else 2
    text = tuple(range(40, 60))
    alone = model.extend([Feed(1, 0, text)])[0]
    model.extend([Feed(0, 0, case.prompt[:middle]), Feed(1, 0, text[:7])])
    both = model.extend([Feed(1, 7, text[7:]), Feed(0, middle, case.prompt[middle:])])
    assert_near(both[0], alone)
    assert_near(both[1], case.logits[start - 1])
    model.copy([0], [2])
    found = model.extend([Feed(slot, start, FOLLOWING[:1]) for slot in (2, 0)])
    for each in found:
        assert_near(each, case.logits[start])
    again = model.extend([Feed(0, 0, text)])[0]  # the slot has had images
    assert_near(again, alone)


@pytest.mark.parametrize("size", [1, 7])
def test_prompts_are_read_in_parts(case: Case, size: int) -> None:
    """An image whose tokens attend to each other in both directions is read as a whole, however small the parts are."""
    batch = RunningBatch(case.opened.model, prompt_tokens=size)
    pictures = tuple(case.pictures)
    batch.add(Request(case.prompt, 3, Sampling(0), log_probs=1, pictures=pictures))
    first = next(steps(batch))
    assert first.likelihood is not None
    expected = case.logits[len(case.prompt) - 1].log_softmax(-1)
    assert first.token == expected.argmax()
    assert first.likelihood.log_prob == pytest.approx(expected.max().item(), abs=1e-3)


LAYOUTS = {"tp": (2, 1, 1), "pp": (1, 2, 1), "pp4": (1, 4, 1), "dp": (1, 1, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_give_the_same(layout: str, tmp_path: Path, world: World) -> None:
    """Qwen3-VL adds to the output of its first two layers, which are on two of four stages."""
    create("qwen3_vl", tmp_path / "hf")
    write_chats(tmp_path / "data")
    _, logits = of_transformers("qwen3_vl", tmp_path)
    tp, pp, dp = LAYOUTS[layout]
    found = world.run(tp * pp * dp, in_layout, tmp_path, *LAYOUTS[layout])[0]
    for each, expected in zip(found, logits[-1 - len(FOLLOWING) :], strict=True):
        assert_near(each, expected)


# Commands.


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    create("qwen2_5_vl", directory / "hf")
    write_chats(directory / "data")
    return directory


def answer_of_transformers(directory: Path, names: Sequence[str], text: str, count: int) -> str:
    """The greedy answer to a message with images before its text."""
    content = [*({"type": "image"} for _ in names), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    ids, arguments = arguments_of_transformers("qwen2_5_vl", directory, messages, names)
    row = torch.tensor([ids])
    made = load_whole(directory).generate(
        input_ids=row,
        attention_mask=torch.ones_like(row),
        mm_token_type_ids=(row == token(WORD)).int(),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **arguments,
    )
    answer: str = tokenizer().decode(made[0, len(ids) :], skip_special_tokens=True)
    return answer


def uri(directory: Path, name: str) -> str:
    content = base64.b64encode((directory / "data" / name).read_bytes()).decode()
    return f"data:image/png;base64,{content}"


def test_chat_shows_images(
    qwen: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "leave", sys.exit)
    data = qwen / "data"
    lines = [f"/image {data}/none.png", f"/image {data}/0.png", f"/image {data}/1.png", "what?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "/new", *lines[1:], ""])))
    with pytest.raises(SystemExit) as end:
        main(["chat", str(qwen / "hf"), "--dtype", "fp32", "--max-new-tokens", "6", "--ignore-eos"])
    assert not end.value.code
    said = capfd.readouterr()
    answer = answer_of_transformers(qwen, NAMES, "what?", 6)
    assert said.out == f"{answer}\n{answer}\n"
    assert said.err == f"{data}/none.png: can't be read: No such file or directory\n"


def test_generate_answers_chats_with_images(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all forms of records that training takes."""
    monkeypatch.setattr(launch, "leave", sys.exit)
    output = tmp_path / "out.jsonl"
    words = [
        "--prompts-file",
        str(qwen / "data/chats.jsonl"),
        "--output",
        str(output),
        "--slots",
        "1",
    ]
    with pytest.raises(SystemExit) as end:
        main(
            [
                "generate",
                str(qwen / "hf"),
                "--dtype",
                "fp32",
                "--max-new-tokens",
                "6",
                "--ignore-eos",
                *words,
            ]
        )
    assert not end.value.code
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[0]["text"] == answer_of_transformers(qwen, NAMES[:1], "what is it?", 6)
    assert [line["prompt"] for line in lines] == [
        "what is it?",
        "compare  and ",
        "no image",
        "\nhello",
    ]
    assert len({line["chat"] for line in lines}) == 4
    assert [line["reference"] for line in lines] == ["a cat", "they differ", "none", "bye"]


@pytest.fixture(scope="module")
def server(qwen: Path) -> Iterator[ForkedServing]:
    running = ForkedServing(qwen / "hf", "--dtype", "fp32", "--slots", "2")
    yield running
    assert running.end()[0] == 0


ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SETTINGS = {"temperature": 0, "logit_bias": {"258": -100}}


def asked(route: str, uris: Sequence[str]) -> dict[str, Any]:
    """A request of a message with images."""
    if route == ROUTES[0]:
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in uris]
        text = {"type": "text", "text": "what?"}
        return {
            **SETTINGS,
            "messages": [{"role": "user", "content": [*parts, text]}],
            "max_tokens": 6,
        }
    if route == ROUTES[1]:
        parts = [{"type": "input_image", "image_url": each} for each in uris]
        text = {"type": "input_text", "text": "what?"}
        content = [*parts, text]
        return {**SETTINGS, "input": [{"role": "user", "content": content}], "max_output_tokens": 6}
    sources = [
        {"type": "base64", "media_type": "image/png", "data": each.partition(",")[2]}
        for each in uris
    ]
    blocks = [{"type": "image", "source": source} for source in sources]
    content = [*blocks, {"type": "text", "text": "what?"}]
    return {**SETTINGS, "messages": [{"role": "user", "content": content}], "max_tokens": 6}


def text_of(route: str, body: Any) -> str:
    if route == ROUTES[0]:
        return str(body["choices"][0]["message"]["content"])
    if route == ROUTES[1]:
        return str(body["output"][-1]["content"][0]["text"])
    return str(body["content"][0]["text"])


@pytest.mark.parametrize("route", ROUTES)
def test_routes_take_images(route: str, qwen: Path, server: ForkedServing) -> None:
    status, body = server.ask(route, asked(route, [uri(qwen, name) for name in NAMES]))
    assert status == 200, body
    assert text_of(route, body) == answer_of_transformers(qwen, NAMES, "what?", 6)


def test_a_row_with_the_same_images_is_continued(qwen: Path, server: ForkedServing) -> None:
    """Another image makes another row, although the tokens of all images look alike to transformers."""
    route = ROUTES[0]
    uris = [uri(qwen, name) for name in ("3.png", "2.png")]
    server.ask(route, asked(route, uris))
    before = server.metric("prompt_tokens_reused_total")
    server.ask(route, asked(route, uris))
    after = server.metric("prompt_tokens_reused_total")
    assert after > before
    _, body = server.ask(route, asked(route, uris[::-1]))
    assert server.metric("prompt_tokens_reused_total") == after
    assert text_of(route, body) == answer_of_transformers(qwen, ("2.png", "3.png"), "what?", 6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1/a.png", "should be a data URI in base64"),
        ("file:///etc/passwd", "should be a data URI in base64"),
        ("/etc/passwd", "should be a data URI in base64"),
        ("data:image/png;base64,!!", "invalid base64"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,aGVsbG8=", "can't be read as an image"),
        (3, "should be a data URI in base64"),
    ],
)
def test_other_images_are_refused(given: Any, expected: str, server: ForkedServing) -> None:
    status, body = server.ask(ROUTES[0], asked(ROUTES[0], [given]))
    assert status == 400
    assert expected in body["error"]["message"]


def test_a_text_with_the_token_of_images_is_refused(qwen: Path, server: ForkedServing) -> None:
    body = asked(ROUTES[0], [uri(qwen, "0.png")])
    body["messages"][0]["content"][1]["text"] = f"what is {WORD}?"
    status, found = server.ask(ROUTES[0], body)
    assert status == 400
    assert "2 tokens of images" in found["error"]["message"]


def test_an_image_that_a_rank_has_no_longer_comes_again(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_images, "MOST_VECTORS", 60)
    opened = opened_model(qwen / "hf")
    found = []
    for names in (NAMES, ("2.png", "3.png"), NAMES):
        pictures = [opened.images.add(ImageFile(qwen / "data" / name)) for name in names]
        assert sum(each.written.grid.tokens for each in pictures) <= 60
        prompt = encode_chat(opened.tokenizer, PROMPT, pictures=pictures)
        found.append((prompt, opened.model.extend([Feed(0, 0, prompt)])))
    first, other, again = found
    assert first[0] == again[0] != other[0]
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_the_same_bytes_are_the_same_image(qwen: Path, tmp_path: Path) -> None:
    opened = opened_model(qwen / "hf")
    path = qwen / "data" / "0.png"
    first = opened.images.add(ImageFile(path))
    assert opened.images.add(ImageFile(path.read_bytes())) is first
    with pytest.raises(UsageError, match=r"none\.png: can't be read: No such file"):
        opened.images.add(ImageFile(tmp_path / "none.png"))


def test_models_of_text_refuse_images(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="this model reads text alone; send no images, or start"):
        opened_model(tmp_path).images.add(ImageFile(b""))


def test_no_image_of_a_feed_is_dropped(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that was shown first either: it was used last."""
    monkeypatch.setattr(shown_images, "MOST_VECTORS", 1)
    opened = opened_model(qwen / "hf")
    shared = opened.images.add(ImageFile(qwen / "data" / "0.png"))
    for name in ("1.png", "2.png", "3.png", "1.png"):
        pictures = [shared, opened.images.add(ImageFile(qwen / "data" / name))]
        prompt = encode_chat(opened.tokenizer, PROMPT, pictures=pictures)
        found = opened.model.extend([Feed(0, 0, prompt)])
        assert found.isfinite().all()


def test_ids_of_images_in_a_text_are_refused(qwen: Path) -> None:
    """The tokenizer of numbers could give any."""
    opened = opened_model(qwen / "hf")
    opened.model.images = None
    with pytest.raises(UsageError, match="is outside the model's vocabulary"):
        opened.model.extend([Feed(0, 0, (FIRST,))])


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RuntimeError("out of memory"), "an image can't be encoded: out of memory")],
)
def test_an_image_that_cannot_be_encoded_is_refused(
    error: Exception, expected: str, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(ImageEncoder, "encode", fail)
    opened = opened_model(qwen / "hf")
    with pytest.raises(UsageError, match=expected):
        opened.images.add(ImageFile(qwen / "data" / "0.png"))


def test_a_contradicting_config_leaves_texts_alone(qwen: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(qwen / "hf", tmp_path / "hf")
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    (copy / "config.json").write_text(json.dumps(config))
    opened = opened_model(copy)
    with pytest.raises(UsageError, match="mrope_section"):
        opened.images.add(ImageFile(b""))


def test_images_on_the_terminal_need_names(qwen: Path) -> None:
    talk = Conversation(opened_model(qwen / "hf").images, [])
    with pytest.raises(UsageError, match="/image needs the name of a file: /image FILE"):
        talk.hear("/image")
    with pytest.raises(UsageError, match=r"~nobody-of-this-name/a\.png"):
        talk.hear("/image ~nobody-of-this-name/a.png")
    damaged = qwen / "damaged.png"
    damaged.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UsageError, match=r"damaged\.png"):
        talk.hear(f"/image {damaged}")
    with pytest.raises(UsageError, match="should be the file of an image"):
        talk.hear(f"/image {qwen}")
    assert talk.hear("/images are fine")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TensorMismatch("lacks a tensor"), "lacks a tensor"),
        (RuntimeError("out of memory"), "hf: its encoder can't be loaded: out of memory"),
    ],
)
def test_a_server_without_its_encoder_serves_texts(
    error: Exception,
    expected: str,
    qwen: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = opened_model(qwen / "hf")

    def fail(_: object, *__: object) -> None:
        raise error

    monkeypatch.setattr(ImageEncoder, "__init__", fail)
    images = loaded(opened.images)
    said = capfd.readouterr().err
    assert said.startswith("no images are read: ")
    assert said.endswith(f"{expected}\n")
    with pytest.raises(UsageError, match=expected):
        images.add(ImageFile(qwen / "data" / "0.png"))


def test_an_image_of_anthropics_form_needs_data(server: ForkedServing) -> None:
    source = {"type": "base64", "media_type": "image/png"}
    content = [{"type": "image", "source": source}]
    body = {"system": "a", "messages": [{"role": "user", "content": content}], "max_tokens": 3}
    for data, expected in ((None, "needs the text data"), ("ä", "invalid base64")):
        if data is not None:
            source["data"] = data
        status, found = server.ask(ROUTES[2], body)
        assert status == 400
        assert "message 0" in found["error"]["message"]
        assert expected in found["error"]["message"]


def test_tokens_are_counted_without_the_encoder(
    qwen: Path, server: ForkedServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the headers of the images. An answer counts the same."""
    body = asked("/v1/messages", [uri(qwen, name) for name in ("0.png", "1.png", "0.png")])
    status, answered = server.ask("/v1/messages", body)
    assert status == 200, answered
    _, counted = server.ask("/v1/messages/count_tokens", {"messages": body["messages"]})
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}

    gallery = opened_model(qwen / "hf").images
    monkeypatch.setattr(gallery, "_load_encoder", lambda: pytest.fail("the encoder is loaded"))
    one, other, same = (
        gallery.measuring().add(ImageFile(qwen / "data" / name))
        for name in ("0.png", "1.png", "0.png")
    )
    assert one.written == same.written != other.written
    # What counts images knows none of them later.
    assert not gallery._known  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="can't be read"):
        gallery.measuring().add(ImageFile(qwen / "gone.png"))


def test_the_list_of_models_says_whether_images_are_read(server: ForkedServing) -> None:
    _, found = server.ask("/v1/models")
    assert found["data"][0]["meta"]["images"] is True


def test_runs_end_between_texts_images_and_repeated_images() -> None:
    one, other = tokens_of(0, 3), tokens_of(1, 2)
    row = [5, 6, *one, *one, *other, 7, one[1], one[2]]
    runs = [run.tolist() for run in runs_of(row)]
    assert runs == [[5, 6], [*one], [*one], [*other], [7], [one[1], one[2]]]
    assert [run.tolist() for run in runs_of([9])] == [[9]]
