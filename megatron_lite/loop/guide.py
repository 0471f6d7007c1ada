"""`--guide`: what a newcomer wants to see at the start and at the end of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_lite.data.tokenizer import has_chat_template
from megatron_lite.loop import curve
from megatron_lite.loop.answers import Question, answer, question
from megatron_lite.loop.best import kept_best
from megatron_lite.loop.run import Run
from megatron_lite.objectives.image_models import multimodal_model


@dataclass
class Guide:
    """The answer before the training, and the lines at its end. Without --guide it does nothing."""

    run: Run
    asked: Question | None = None
    before: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Let the model answer before the first step. Collective."""
        if not self.run.settings.logging.guide:
            return
        self.asked = question(self.run)
        if self.asked is not None:
            self.before = answer(self.run, self.asked)

    def end(self) -> None:
        """Print the answers, the loss curve and the next commands. Collective."""
        if not self.run.settings.logging.guide:
            return
        if self.asked is not None:
            self._say_answers(self.asked)
        if self.run.losses:
            self.run.say("loss of each step:")
            for line in curve.draw(self.run.losses):
                self.run.say(line)
        for line in next_commands(self.run):
            self.run.say(line)

    def _say_answers(self, asked: Question) -> None:
        spelled = self.run.tokenizer.spelled
        after = answer(self.run, asked)
        self.run.say("the first example:")
        self.run.say(f"  prompt    {spelled(asked.prompt)!r}")
        self.run.say(f"  learned   {spelled(asked.expected)!r}")
        self.run.say(f"  before    {spelled(self.before)!r}")
        label = "after" if kept_best(self.run) is None else "last step"
        self.run.say(f"  {label:<9} {spelled(after)!r}")


def _talk(run: Run, loading: str) -> str:
    """Return the line for an answer of the model. Without a chat template, `chat` refuses the model."""
    if run.settings.data.chat_template or has_chat_template(run.tokenizer):
        return f"  chat      megatron-lite chat {loading}"
    return f"  generate  megatron-lite generate {loading} 'PROMPT'"


def next_commands(run: Run) -> Iterator[str]:
    """Yield the commands to use the result."""
    saving = run.settings.checkpointing
    if saving.save is None:
        return
    saved = kept_best(run) or saving.save
    yield "next:"
    makes_vectors = run.settings.embeddings.embedding
    talks = not run.config.has("scores") and not makes_vectors
    if run.settings.lora.wanted:
        model = f"{saving.save}-merged"
        if talks:
            yield _talk(run, f"--load {saving.load} --adapter {saved}")
        yield f"  merge     megaconv merge {saving.load} {saved} --save-dir {model}"
    else:
        model = saved
        if talks:
            yield _talk(run, f"--load {model}")
        whole = multimodal_model(run.settings)
        base = "" if whole is None else f" --base {whole}"
        converted = f"{saving.save}-hf"
        yield f"  convert   megaconv convert {model} {converted} --saver hf{base}"
        model = converted if whole is not None or saved != saving.save else model
    if makes_vectors:
        yield f"  embed     megatron-lite embed --load {model} --evidence-data-path PASSAGES --output INDEX"
    yield f"  publish   megaconv push {model} USER/NAME"
