"""The chat template in older files of multimodal models. transformers' processors read it, and its tokenizers don't.

chat_template.json    {"chat_template": "{% for message in messages %}..."}
"""

from pathlib import Path

from megaconv.families.parts.hf_config import load_config

NAME = "chat_template.json"


def processor_template(directory: Path) -> str | None:
    """Return the template; None without such a file. Raises CorruptCheckpoint for a file that is no JSON object."""
    path = directory / NAME
    template = load_config(path).get("chat_template") if path.is_file() else None
    return template if isinstance(template, str) else None
