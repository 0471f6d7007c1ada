"""OpenAI's routes of completions and chats: the request, and the form of its answer."""

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_answers import Form
from megatron_lite.inference.server.openai_requests import Wanted, chat, completion
from megatron_lite.inference.slots import Drafter


def read_completion(fields: Fields, opened: Opened, name: str) -> tuple[Wanted, Form]:
    """Read a request of /v1/completions. Raises Refused."""
    wanted = completion(fields, opened, name)
    return wanted, _form(wanted, opened, chat=False)


def read_chat(fields: Fields, opened: Opened, name: str) -> tuple[Wanted, Form]:
    """Read a request of /v1/chat/completions. Raises Refused."""
    wanted = chat(fields, opened, name)
    return wanted, _form(wanted, opened, chat=True)


def _form(wanted: Wanted, opened: Opened, *, chat: bool) -> Form:
    prompts = [() if wanted.echo else prompt for prompt in wanted.prompts]
    continued = [prompt for prompt in prompts for _ in range(wanted.choices)]
    return Form(
        chat=chat,
        model=wanted.model,
        detokenize=opened.tokenizer.detokenize,
        log_probs=wanted.log_probs is not None,
        drafts=isinstance(opened.model, Drafter),
        prompt_tokens=wanted.prompt_tokens,
        usage=wanted.usage,
        continued=() if chat else continued,
    )
