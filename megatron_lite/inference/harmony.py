"""Reads an answer in harmony, GPT-OSS' format, token by token: its text, its thinking, its calls of tools.

An answer is one message or several. The header of each says what the message is:

| header | message |
|---|---|
| channel `final`, or no channel | text |
| channel `commentary` without a recipient | text: a preamble, which tells the user what the model will do |
| a recipient `functions.NAME`, in the part of the role or of the channel | a call, if the name is that of an offered tool |
| everything else: `analysis`, unknown channels, recipients or roles | thinking |

A model may also write what the format forbids. Special tokens are therefore never text, wherever they come.
The format: github.com/openai/harmony, docs/format.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from megatron_lite.data.harmony import Marks
from megatron_lite.inference.answer import Call, Said
from megatron_lite.inference.text import Detokenize, TextStream

BETWEEN = "\n\n"
"""It separates the texts of two messages of the same kind."""
_SHOWN = ("final", "commentary")
"""Channels of text for the user."""
_TO, _FUNCTIONS = "to=", "functions."
_NOBODY = ("all", "user")
"""Recipients that mean no tool."""


class Kind(Enum):
    """The meaning of a message's content."""

    TEXT = auto()
    THINKING = auto()
    CALL = auto()


@dataclass(frozen=True)
class Header:
    """A message's header."""

    kind: Kind
    tool: str = ""
    """The name of the tool that is called."""


def read_header(role: str, channel: str | None, tools: Collection[str]) -> Header:
    """Return the meaning of a header.

    role: the text before `<|channel|>`. channel: the text behind it, up to the content's type; None without a channel.
    """
    # A model without channels writes only text.
    name, *in_channel = ["final"] if channel is None else channel.split() or [""]
    of_role = role.split()
    authors = [word for word in of_role if not word.startswith(_TO)]
    if authors not in ([], ["assistant"]):
        return Header(Kind.THINKING)
    recipient = _recipient([*of_role, *in_channel], [name, *in_channel])
    if recipient is not None:
        tool = recipient if recipient in tools else recipient.removeprefix(_FUNCTIONS)
        return Header(Kind.CALL, tool) if tool in tools else Header(Kind.THINKING)
    return Header(Kind.TEXT if name in _SHOWN else Kind.THINKING)


def _recipient(marked: Sequence[str], bare: Sequence[str]) -> str | None:
    """Return the tool that a message is for, or None.

    marked: words that may be `to=` and a name. bare: words that may be a function's name alone, since models also leave out
    `to=`, and the channel before it.
    """
    named = [word[len(_TO) :] for word in marked if word.startswith(_TO)]
    named += [word for word in bare if word.startswith(_FUNCTIONS)]
    return next((each for each in named if each not in _NOBODY), None)


class HarmonyStream:
    """The state of one answer. Text that may become a stop word, and partial characters, are held back."""

    def __init__(
        self,
        marks: Marks,
        detokenize: Detokenize,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        tools: Collection[str] = (),
    ) -> None:
        """prompt: its last message is the beginning of the answer.

        stop: words that end the answer where its text has them. tools: names of the tools that it may call.
        """
        self._marks, self._all, self._detokenize = marks, marks.all, detokenize
        self._stop, self._tools = tuple(stop), tools
        self._header: list[int] | None = []
        """The tokens of a header that is not complete; None within a message's content."""
        self._named = False
        """True if the answer itself began the message with `<|start|>`."""
        self._message = Header(Kind.TEXT)
        self._content = self._stream()
        self._arguments = ""
        self._separate = False
        """True if the next text of the message has to be separated from an earlier message's."""
        self._begun: set[Kind] = set()
        """The kinds of messages that have text already."""
        self.calls: list[Call] = []
        """The complete calls."""
        for token in prompt[_last(prompt, marks.start) :]:
            self.add(token)
        self._named, self._begun, self._content = False, set(), self._stream()

    @property
    def stop_word(self) -> str:
        """The stop word that ended the answer; "" without one."""
        return self._content.stop_word

    def add(self, token: int) -> Said:
        """Add a token that does not end the answer, and return what has become final."""
        marks = self._marks
        if self.stop_word:
            return Said()
        if token in (marks.start, marks.end, *marks.stops):
            said = self._end(complete=True)
            self._header, self._named = [], token == marks.start
            return said
        if self._header is not None:
            if token != marks.message:
                self._header.append(token)
                return Said()
            self._begin()
            return Said(only_marks=True)
        if (
            token == marks.channel
        ):  # the model left out the end of one message and the start of the next
            said = self._end(complete=True)
            self._header, self._named = [token], True
            return said
        return Said() if token in self._all else self._shown(self._content.add(token))

    def finish(self, *, complete: bool) -> Said:
        """End the answer and return what was held back. complete: True after an end token."""
        return self._end(complete=complete)

    def _stream(self) -> TextStream:
        is_text = self._message.kind is Kind.TEXT
        return TextStream(self._detokenize, self._stop if is_text else ())

    def _begin(self) -> None:
        """Begin the content of a message."""
        role, channel = self._parts()
        self._message = read_header(role, channel, self._tools)
        self._header, self._arguments = None, ""
        self._content = self._stream()
        self._separate = self._message.kind in self._begun

    def _parts(self) -> tuple[str, str | None]:
        """Return the texts of a header: the one before the channel, and that of the channel; None without a channel."""
        parts: list[list[int]] = [[]]
        in_type = False
        for token in self._header or ():
            if token == self._marks.channel:
                parts, in_type = [parts[0], []], False  # of several channels the last one counts
            elif token == self._marks.constrain:
                in_type = True
            elif not in_type:
                parts[-1].append(token)
        texts = [self._detokenize(part) for part in parts]
        return texts[0], texts[1] if len(texts) > 1 else None

    def _end(self, *, complete: bool) -> Said:
        """End the present message, if there is one. A call counts only if it is complete."""
        if self._header is not None:
            return self._end_header(complete=complete)
        said = self._shown(self._content.finish())
        if self._message.kind is not Kind.CALL:
            return said
        if complete:
            self.calls.append(Call(self._message.tool, self._arguments.strip() or "{}"))
            return Said()
        # No client can answer half a call.
        return self._show_as(Kind.THINKING, self._arguments)

    def _end_header(self, *, complete: bool) -> Said:
        """Return the text of a message without `<|message|>`.

        A model that does not keep the format may write only text. A header that is cut off is no text.
        """
        role, channel = self._parts()
        text = role.removeprefix("assistant")
        is_cut = not complete and (self._named or "to=".startswith(text.strip()[:3]))
        if channel is not None or "to=" in role or is_cut:
            return Said()
        if self._named and text == role:  # the message of another author
            return Said()
        places = [place for word in self._stop if (place := text.find(word)) >= 0]
        return self._show_as(Kind.TEXT, text[: min(places, default=len(text))])

    def _show_as(self, kind: Kind, text: str) -> Said:
        self._message, self._separate = Header(kind), kind in self._begun
        return self._shown(text)

    def _shown(self, text: str) -> Said:
        """Return new text of the present message as what it means."""
        kind = self._message.kind
        if kind is Kind.CALL:
            self._arguments += text
            return Said()
        if not text:
            return Said()
        self._begun.add(kind)
        text = BETWEEN + text if self._separate else text
        self._separate = False
        return Said(text) if kind is Kind.TEXT else Said(thinking=text)


def _last(prompt: Sequence[int], token: int) -> int:
    """Return the place of a token's last occurrence; the end without one."""
    return max((place for place, each in enumerate(prompt) if each == token), default=len(prompt))
