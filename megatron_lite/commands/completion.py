"""`megatron-lite completion SHELL`: a script that completes commands and flags."""

import argparse

from megatron_lite.commands.catalog import OTHERS
from megatron_lite.settings.config import flags
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.training_commands import DESCRIPTIONS

EXAMPLES = """examples:
  eval "$(megatron-lite completion bash)"                                  # in ~/.bashrc
  megatron-lite completion zsh > "${fpath[1]}/_megatron-lite"
  megatron-lite completion fish > ~/.config/fish/completions/megatron-lite.fish
"""

_BASH = """\
_megatron_lite() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [ "${{word#-}}" != "$word" ]; then
        case "${{COMP_WORDS[1]}}" in
            pretrain|finetune) words="{flags}" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _megatron_lite megatron-lite megatron_lite
"""

_ZSH = """\
#compdef megatron-lite megatron_lite
_megatron_lite() {{
    if (( CURRENT == 2 )); then
        compadd -- {commands}
    elif [[ "$PREFIX" == -* && "${{words[2]}}" == (pretrain|finetune) ]]; then
        compadd -- {flags}
    else
        _files
    fi
}}
compdef _megatron_lite megatron-lite megatron_lite
"""

_FISH_COMMANDS = 'complete -c megatron-lite -n "__fish_use_subcommand" -f -a "{commands}"\n'
_FISH_FLAG = (
    'complete -c megatron-lite -n "__fish_seen_subcommand_from pretrain finetune" -l {flag}\n'
)


def main(words: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = FlagParser(
        prog="megatron-lite completion",
        description="Print a script that completes commands and flags.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    print(script(parser.parse_args(words).shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the script for bash, zsh or fish."""
    commands = " ".join((*DESCRIPTIONS, *OTHERS))
    names = sorted(
        [name.replace("_", "-") for name in flags()] + ["recipe", "yaml-cfg", "help-all"]
    )
    if shell == "fish":
        lines = [_FISH_FLAG.format(flag=name) for name in names]
        return _FISH_COMMANDS.format(commands=commands) + "".join(lines)
    template = _BASH if shell == "bash" else _ZSH
    return template.format(commands=commands, flags=" ".join(f"--{name}" for name in names))
