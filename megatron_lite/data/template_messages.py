"""Messages of OpenAI's protocol, as a chat template expects them. The server and finetuning render the same ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lite.data.content_parts import with_parts
from megatron_lite.data.harmony_messages import with_harmony_fields
from megatron_lite.data.roles import with_known_roles
from megatron_lite.data.thinking_fields import with_thinking_fields
from megatron_lite.data.tool_calls import with_arguments_for


def as_template_expects(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """Return the messages with the roles, fields, arguments and parts that the template reads. Raises ValueError."""
    known = with_known_roles(messages, template)
    thought = with_thinking_fields(with_arguments_for(known, template), template)
    return with_parts(with_harmony_fields(thought, template), template)
