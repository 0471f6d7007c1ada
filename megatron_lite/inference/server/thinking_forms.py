"""The forms in which models mark their thinking, and the one that a chat template writes.

The marks are those of the models' chat templates, and of the parsers of vLLM (vllm/reasoning) and SGLang
(srt/parser/reasoning_parser.py). GPT-OSS has channels instead (inference/harmony.py).
"""

from dataclasses import dataclass

from megatron_lite.inference.server.calls.table import BY_TEMPLATE


@dataclass(frozen=True)
class ThinkingForm:
    """The way in which a model marks its thinking."""

    name: str
    """The value of --reasoning."""
    begins: tuple[str, ...]
    """Marks that begin the thinking; a model writes one of them."""
    ends: tuple[str, ...]
    """Marks that end it."""
    signs: tuple[str, ...]
    """Texts of a chat template of this form. A template has all of them."""
    answer: tuple[str, str] | None = None
    """Marks around the answer, which are left out."""
    tokens: tuple[str, ...] = ()
    """Special tokens of which marks consist."""
    repeats: bool = False
    """True if further thinking may follow in the answer. The marks are special tokens, which no text has."""

    @property
    def answer_ends(self) -> tuple[str, ...]:
        """Marks that end the answer, also behind a line break."""
        return () if self.answer is None else (f"\n{self.answer[1]}", self.answer[1])

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks and the special tokens in them."""
        return (*self.begins, *self.ends, *(self.answer or ()), *self.tokens)


_THINK = ("<think>",), ("</think>",)
_GRANITE = tuple(
    tuple(f"{words} {mark}:" for words in ("Here is", "Here's"))
    for mark in ("my thought process", "my response")
)
FORMS = (
    ThinkingForm("mistral", ("[THINK]",), ("[/THINK]",), ("[THINK]",), repeats=True),
    ThinkingForm(
        "gemma-4", ("<|channel>thought\n", "<|channel>"), ("<channel|>",), ("<|channel>",),
        tokens=("<|channel>",), repeats=True,
    ),
    ThinkingForm("seed-oss", ("<seed:think>",), ("</seed:think>",), ("<seed:think>",)),
    ThinkingForm("minimax-m3", ("<mm:think>",), ("</mm:think>",), ("<mm:think>",)),
    ThinkingForm("kimi-vl", ("◁think▷",), ("◁/think▷",), ("◁think▷",)),
    ThinkingForm(
        "apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), ("<|inner_prefix|>",), repeats=True
    ),
    ThinkingForm(
        "command-a-plus", ("<|START_THINKING|>",), ("<|END_THINKING|>",),
        ("<|START_THINKING|>", "<|START_TEXT|>"), ("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThinkingForm(
        "command-a", ("<|START_THINKING|>",), ("<|END_THINKING|>",), ("<|START_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ThinkingForm("granite-3.2", _GRANITE[0], _GRANITE[1], _GRANITE[0][:1]),
    ThinkingForm("pangu", ("[unused16]",), ("[unused17]",), ("[unused16]",)),
    ThinkingForm("exaone-deep", ("<thought>",), ("</thought>",), ("<thought>",)),
    ThinkingForm("reka-flash-3", ("<reasoning>",), ("</reasoning>",), ("<reasoning>",)),
    ThinkingForm(
        "apriel", ("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), ("[BEGIN FINAL RESPONSE]",),
        ("", "[END FINAL RESPONSE]"),
    ),
    ThinkingForm(
        "hunyuan-3", ("<think:opensource>", "<think>"), ("</think:opensource>", "</think>"), ("<think{}>",)
    ),
    ThinkingForm("hunyuan-a13b", *_THINK, ("<answer>",), ("<answer>", "</answer>")),
    ThinkingForm("ernie-4.5", *_THINK, ("<think>", "<response>"), ("<response>", "</response>")),
    ThinkingForm("deepseek-r1", *_THINK, ("<think>",)),
)  # fmt: skip
"""The forms, those with the most particular signs first."""
NAMES = (BY_TEMPLATE, *sorted(form.name for form in FORMS))
"""The values of --reasoning."""


def thinking_forms_of(name: str, template: str) -> tuple[ThinkingForm, ...]:
    """Return the form of a name, or for `auto` the form that a chat template writes.

    A template without any form's signs leaves open all forms whose answers have no marks. An answer of another model may
    have those as text. An empty text is no template.
    """
    if name != BY_TEMPLATE:
        return tuple(form for form in FORMS if form.name == name)
    written = [form for form in FORMS if all(sign in template for sign in form.signs)]
    return tuple(written[:1]) or tuple(form for form in FORMS if form.answer is None)
