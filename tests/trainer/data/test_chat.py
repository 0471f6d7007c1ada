"""Conversations: the tokens and masks of transformers, from templates with and without marks; what can't be right is refused."""

import random
from pathlib import Path
from typing import Any

import pytest

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.chat import ChatTemplate
from megatron_lite.data.finetuning.examples import ReadingOptions, read_examples
from megatron_lite.data.finetuning.forms import Chat, read_record
from megatron_lite.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from tests.trainer.data.chat_templates import (
    LAST_ANSWER_THINKS,
    MARKED,
    QWEN3,
    THINKING,
    save_tokenizer,
    without_marks,
)

TURNS = [
    {"role": "user", "content": "Where does the fox sleep? 北京 🎉"},
    {"role": "assistant", "content": "The fox doesn't sleep: it jumps."},
    {"role": "user", "content": " And the dog?"},
    {"role": "assistant", "content": "naïve café\n\nIt sleeps! 🎉"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "jump", "description": "Jump.", "parameters": {"type": "object"}},
    }
]
CALLS = [
    {"role": "user", "content": "Jump!"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "jump", "arguments": {}}]},
    {"role": "tool", "content": "high"},
    {"role": "assistant", "content": "It jumped."},
    {"role": "user", "content": "Thanks"},
]


def loaded(directory: Path, template: str | None, **options: Any) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(save_tokenizer(directory, template, **options)))


def chats(shape: str) -> list[Chat]:
    system = {"role": "system", "content": "Answer in two languages."}
    found = [Chat(TURNS), Chat([system, *TURNS]), Chat(TURNS[:3]), Chat(TURNS[:2])]
    made_up = [Chat(made_up_turns(random.Random(seed))) for seed in range(40)]
    return (
        [*found, Chat(CALLS, TOOLS), Chat(CALLS), *made_up]
        if shape == "qwen"
        else [*found, *made_up]
    )


PIECES = (
    "fox", " ", "\n", "\n\n", "naïve", "北京", "🎉", "👩‍👩‍👧", "é", "<|im_end|>", "<|im_start|>", "</s>", "[INST]", "<think>", "</think>",
    "{{ x }}", "{% if %}", "\t", "\u00a0", "assistant", "0",
)  # fmt: skip
"""Pieces of texts. Templates and tokenizers treat some of them specially."""


def made_up_turns(seeded: random.Random) -> list[dict[str, str]]:
    turns = []
    for _ in range(seeded.randint(1, 4)):
        for role in ("user", "assistant"):
            turns.append(
                {"role": role, "content": "".join(seeded.choices(PIECES, k=seeded.randint(0, 6)))}
            )
    return turns


def theirs_of(tokenizer: HuggingFaceTokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """transformers' own tokens and mask."""
    made = tokenizer.inner.apply_chat_template(
        list(chat.messages),
        tools=chat.tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return made["input_ids"], [bool(mark) for mark in made["assistant_masks"]]


def learned_text(tokenizer: HuggingFaceTokenizer, template: ChatTemplate, chat: Chat) -> str:
    ids, learned = template.encode(chat)
    return tokenizer.spelled([token for token, mark in zip(ids, learned, strict=True) if mark])


@pytest.mark.oracle
@pytest.mark.parametrize("shape", MARKED)
def test_ids_and_masks_are_those_of_transformers_with_marks_and_without(
    shape: str, tmp_path: Path
) -> None:
    marked = loaded(tmp_path / "marked", MARKED[shape])
    bare = loaded(tmp_path / "bare", without_marks(MARKED[shape]))
    assert bare.inner.chat_template != marked.inner.chat_template
    for chat in chats(shape):
        ids, mask = theirs_of(marked, chat)
        assert 0 < sum(mask) < len(ids)
        for tokenizer in (marked, bare):
            ours = ChatTemplate(tokenizer).encode(chat)
            assert (ours.ids, ours.learned) == (ids, mask)


THOUGHT = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>\ntwo minus one\n</think>\n\none"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\ntwo"},
]


@pytest.mark.oracle
@pytest.mark.parametrize("template", [QWEN3, LAST_ANSWER_THINKS], ids=["qwen 3", "last answer"])
def test_masks_of_templates_that_remove_thinking_are_those_of_transformers(
    template: str, tmp_path: Path
) -> None:
    marked = loaded(tmp_path / "marked", template)
    made_up = [made_up_turns(random.Random(seed)) for seed in range(40)]
    for turns in (THOUGHT, THOUGHT[:2], THOUGHT[:3], *made_up):
        assert ChatTemplate(marked).encode(Chat(turns)) == theirs_of(marked, Chat(turns))
    assert "minus" not in learned_text(marked, ChatTemplate(marked), Chat(THOUGHT))


def test_a_template_with_marks_decides_which_part_of_the_last_answer_is_learned(
    tmp_path: Path,
) -> None:
    """The thinking is left out if the marks leave it out."""
    spoken = QWEN3.replace("{% generation %}", "", 1).replace(
        "{{ said +", "{% generation %}{{ said +", 1
    )
    tokenizer = loaded(tmp_path / "t", spoken)
    assert (
        learned_text(tokenizer, ChatTemplate(tokenizer), Chat(THOUGHT))
        == "one<|im_end|>two<|im_end|>"
    )
    last = ChatTemplate(tokenizer, turns="last")
    assert learned_text(tokenizer, last, Chat(THOUGHT)) == "two<|im_end|>"
    assert learned_text(tokenizer, last, Chat([*THOUGHT, THOUGHT[0]])) == "two<|im_end|>"


@pytest.mark.parametrize("answer", ["It is 🎉", "北京", "é"])
def test_a_character_of_several_tokens_at_the_end_of_the_marks_is_learned_whole(
    answer: str, tmp_path: Path
) -> None:
    """transformers' mask has its first token alone."""
    template = MARKED["chatml"].replace(
        "m.content + '<|im_end|>' }}{% endgeneration %}",
        "m.content }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    assert template != MARKED["chatml"]
    tokenizer = loaded(tmp_path / "t", template)
    chat = Chat([TURNS[0], {"role": "assistant", "content": answer}, *TURNS[2:]])
    assert (
        learned_text(tokenizer, ChatTemplate(tokenizer), chat) == f"{answer}{TURNS[3]['content']}"
    )


def test_the_end_of_a_turn_is_learned_and_the_line_break_behind_it_is_not(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path / "t", without_marks(MARKED["chatml"]))
    ids, learned = ChatTemplate(tokenizer).encode(Chat(TURNS))
    text = tokenizer.spelled([token for token, mark in zip(ids, learned, strict=True) if mark])
    assert text == "The fox doesn't sleep: it jumps.<|im_end|>naïve café\n\nIt sleeps! 🎉<|im_end|>"


def test_a_template_without_special_tokens_is_ended_by_the_end_of_the_text(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = loaded(tmp_path / "t", template)
    ids, learned = ChatTemplate(tokenizer).encode(Chat(TURNS[:2]))
    assert tokenizer.spelled(
        [token for token, mark in zip(ids, learned, strict=True) if mark]
    ).endswith("it jumps.\n</s>")


def test_a_template_that_rewrites_earlier_turns_is_refused_and_the_last_answer_can_be_had(
    tmp_path: Path,
) -> None:
    tokenizer = loaded(tmp_path / "t", THINKING)
    with pytest.raises(
        BadRecord, match=r"message 2: .* --finetune-turns last learns .* --chat-template FILE"
    ):
        ChatTemplate(tokenizer).encode(Chat(TURNS))
    ids, learned = ChatTemplate(tokenizer, turns="last").encode(Chat(TURNS))
    assert tokenizer.spelled([token for token, mark in zip(ids, learned, strict=True) if mark]) == (
        "<think>\n\n</think>\n\nnaïve café\n\nIt sleeps! 🎉<|im_end|>"
    )
    ChatTemplate(tokenizer).encode(Chat(TURNS[:2]))
    ChatTemplate(tokenizer, MARKED["chatml"]).encode(Chat(TURNS))


def test_sharegpt_and_alpaca_are_the_same_conversation(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path / "t", MARKED["chatml"])
    names = {"user": "human", "assistant": "gpt"}
    shared = {
        "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in TURNS[:2]],
        "system": "S",
    }
    alpaca = {"instruction": TURNS[0]["content"], "output": TURNS[1]["content"], "system": "S"}
    parts = {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "S"}]}, *TURNS[:2]]
    }
    made = [
        ChatTemplate(tokenizer).encode(read_record(record).example)
        for record in (shared, alpaca, parts)
    ]  # type: ignore[arg-type]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (MARKED["mistral"], [TURNS[1], TURNS[0]], "refuses it: roles must alternate"),
        (MARKED["chatml"], TURNS[:1], "no message by the assistant"),
        (without_marks(MARKED["chatml"]), TURNS[1:], "begins with the assistant's turn"),
        (
            "{% for m in messages %}{{ m.content.nothing.more }}{% endfor %}",
            TURNS,
            "the chat template refuses it",
        ),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            TURNS,
            "refuses it: access to attribute '__class__'",
        ),
        (
            "{{ cycler.__init__.__globals__.os.system('true') }}",
            TURNS,
            "refuses it: access to attribute '__init__'",
        ),
        ("{% include '/etc/passwd' %}", TURNS, "refuses it: no loader"),
        (
            "{% generation %}{% endgeneration %}{{ messages }}",
            TURNS,
            "refuses it|nothing of it is marked",
        ),
    ],
    ids=[
        "roles",
        "no answer",
        "answer first",
        "undefined",
        "classes",
        "calls",
        "files",
        "empty marks",
    ],
)
def test_a_conversation_that_a_template_cannot_have_is_reported_with_its_line(
    template: str, messages: list[Any], words: str, tmp_path: Path
) -> None:
    import json

    path = tmp_path / "chats.jsonl"
    path.write_text(f"\n{json.dumps({'messages': messages})}\n")
    with pytest.raises(CorruptCheckpoint, match=rf"chats\.jsonl:2: .*({words})"):
        read_examples([str(path)], loaded(tmp_path / "t", template))


def test_a_template_that_is_none_is_not_blamed_on_a_conversation(tmp_path: Path) -> None:
    import json

    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n")
    with pytest.raises(UsageError, match=r"^the chat template can't be read, at its line 2: "):
        read_examples([str(path)], loaded(tmp_path / "t", "{{ bos_token }}\n{% for m in"))


def test_without_a_template_a_chat_is_refused_with_what_to_do_and_alpaca_is_written_out(
    tmp_path: Path,
) -> None:
    import json

    chat, alpaca = tmp_path / "chat.jsonl", tmp_path / "alpaca.jsonl"
    chat.write_text(json.dumps({"messages": TURNS}))
    alpaca.write_text(
        json.dumps({"instruction": "Add.", "input": "1 2", "output": "3", "system": ""})
    )
    tokenizer = loaded(tmp_path / "t", None, begins=True)
    with pytest.raises(UsageError, match="has no chat template; give one: --chat-template FILE"):
        read_examples([str(chat)], tokenizer)
    with pytest.raises(UsageError, match="chats need a Hugging Face tokenizer"):
        read_examples([str(chat)], NullTokenizer(10))
    examples = read_examples([str(alpaca)], tokenizer)
    assert examples.plain_chats == 1
    assert tokenizer.spelled(examples.tokens.tolist()) == (
        "<s>### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>"
    )
    assert tokenizer.spelled(examples.tokens[examples.learned].tolist()) == "3</s>"
    with_template = read_examples(
        [str(chat), str(alpaca)], tokenizer, ReadingOptions(chat_template=MARKED["chatml"])
    )
    assert (len(with_template), with_template.plain_chats) == (2, 0)


def test_begin_and_end_of_a_text_are_as_its_model_expects_and_never_doubled(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(
        '{"text": "a fox"}\n{"text": "<s>a fox</s>"}\n{"prompt": "a", "completion": " fox"}\n'
    )
    for begins in (True, False):
        tokenizer = loaded(tmp_path / str(begins), None, begins=begins)
        examples = read_examples([str(path)], tokenizer)
        bounds = examples.bounds
        texts = [
            tokenizer.spelled(examples.tokens[bounds[k] : bounds[k + 1]].tolist()) for k in range(3)
        ]
        begin = "<s>" if begins else ""
        assert texts == [f"{begin}a fox</s>", "<s>a fox</s>", f"{begin}a fox</s>"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_template_gets_the_arguments_of_a_call_as_an_object(
    tmp_path: Path, wrapped: bool
) -> None:
    """OpenAI's messages have JSON text there. As text it would be learned with quotes around it."""
    call: dict[str, Any] = {"name": "jump", "arguments": '{"height": "3 m"}'}
    calls = [{"id": "1", "type": "function", "function": call}] if wrapped else [call]
    record = {"messages": [CALLS[0], {"role": "assistant", "content": "", "tool_calls": calls}]}
    example = read_record(record).example
    tokenizer = loaded(tmp_path / "model", MARKED["qwen"])
    ids = ChatTemplate(tokenizer).encode(example).ids  # type: ignore[arg-type]
    assert '"arguments": {"height": "3 m"}' in tokenizer.inner.decode(ids)


@pytest.mark.parametrize("given", [{}, {"content": None}, {"content": ""}])
def test_calls_alone_have_an_empty_content_as_in_the_server(given: dict[str, None]) -> None:
    calls = [{"name": "jump", "arguments": {}}]
    message = {"role": "assistant", **given, "tool_calls": calls}
    example = read_record({"messages": [CALLS[0], message]}).example
    assert isinstance(example, Chat)
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_arguments_that_are_no_json_text_stay_as_they_are() -> None:
    call = {"function": {"name": "jump", "arguments": "high"}}
    record = {"messages": [CALLS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    example = read_record(record).example
    assert isinstance(example, Chat)
    assert example.messages[1]["tool_calls"] == [call]


@pytest.mark.parametrize("marked", [True, False])
def test_a_developer_speaks_as_the_system_in_a_template_without_this_role(
    tmp_path: Path, marked: bool
) -> None:
    template = MARKED["chatml"] if marked else without_marks(MARKED["chatml"])
    tokenizer = loaded(tmp_path / "model", template)
    found = [
        ChatTemplate(tokenizer).encode(Chat([{"role": role, "content": "Be brief."}, *TURNS]))
        for role in ("developer", "system")
    ]
    assert found[0] == found[1]
