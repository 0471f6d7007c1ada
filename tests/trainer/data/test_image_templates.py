"""The texts of images in chats: the tokens of transformers' processors of text and images, and their chat templates."""

import json
import shutil
from pathlib import Path

import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from tests.trainer.data.test_images import IMAGE, PAD, TEXT, read
from tests.trainer.image_texts import WITH_PROCESSOR, processor
from tests.trainer.multimodal import TEMPLATE, chats, create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create("qwen3_vl", directory)
    return directory


def test_a_template_with_marks_around_answers_gives_the_same_tokens(
    model: Path, tmp_path: Path
) -> None:
    """The answer has an image too, which is not learned."""
    answer = {"role": "assistant", "content": [TEXT, {**IMAGE, "image": "1.png"}, TEXT]}
    question = {"role": "user", "content": [{**IMAGE, "image": "0.png"}, TEXT]}
    path = write_chats(tmp_path, [*chats(), {"messages": [question, answer, question, answer]}])
    start, end = TEMPLATE.index("{% if message['content']"), TEMPLATE.index("<|im_end|>\n")
    said = TEMPLATE[start:end] + "<|im_end|>"
    by_role = (
        "{% if message['role'] == 'assistant' %}{% generation %}"
        f"{said}{{% endgeneration %}}{{% else %}}{said}{{% endif %}}{{{{ '\\n' }}}}"
    )
    marked = TEMPLATE.replace(f"{said}\n", by_role)
    expected, found = read(model, path), read(model, path, marked)
    assert (found.tokens == expected.tokens).all()
    assert (found.learned == expected.learned).all()
    assert not found.learned[found.tokens == PAD].any()
    assert len(found.images.placed) == 8  # type: ignore[union-attr]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", WITH_PROCESSOR)
def test_the_tokens_of_a_chat_are_those_of_the_processor(kind: str, tmp_path: Path) -> None:
    """Line breaks around an image may form a token with those of the text."""
    import transformers

    create(kind, tmp_path / "model")
    path = write_chats(tmp_path / "data")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    made = processor(kind, tokenizer, transformers)
    texts = [{"type": "text", "text": text} for text in ("compare ", " and ")]
    images = [{"type": "image", "path": str(tmp_path / "data" / f"{n}.png")} for n in (1, 2)]
    asked = [texts[0], images[0], texts[1], images[1]]
    answer = [{"type": "text", "text": "they differ"}]
    conversation = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    expected = made.apply_chat_template(conversation, tokenize=True, return_dict=True)
    examples = read(tmp_path / "model", path)
    first, end = examples.bounds[1:3]
    assert examples.tokens[first:end].tolist() == expected["input_ids"][0]


def test_a_template_of_the_processor_is_read(model: Path, tmp_path: Path) -> None:
    """The files of Mistral Small 3.1 have no other."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    path = write_chats(tmp_path / "data")
    with pytest.raises(UsageError, match="has no chat template"):
        read(tmp_path / "model", path)
    template = tmp_path / "model" / "chat_template.json"
    template.write_text(json.dumps({"chat_template": TEMPLATE}))
    assert (read(tmp_path / "model", path).tokens == read(model, path).tokens).all()
    template.write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"chat_template.json"):
        read(tmp_path / "model", path)
