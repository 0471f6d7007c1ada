"""megaconv converts LLM checkpoints between Hugging Face and Megatron at any parallel layout.

    import megaconv

    megaconv.convert("Llama-2-7b", "ckpt", saver="core", tp=2, pp=2)
    megaconv.open("ckpt").load("layers.0.attn.q.weight")
    megaconv.diff("Llama-2-7b", "ckpt").same
    megaconv.fingerprint("ckpt").weights
    megaconv.verify("ckpt").same

docs/api.md describes the whole interface.
"""

from typing import TYPE_CHECKING, Any

from megaconv import own_packages

if TYPE_CHECKING:
    from megaconv import errors
    from megaconv._version import __version__
    from megaconv.api import (
        apply,
        average,
        clean,
        convert,
        delta,
        diff,
        fingerprint,
        inspect,
        load_transformers,
        merge,
        open,  # noqa: A004
        plan,
        plan_serving,
        plan_training,
        push,
        scan,
        seal,
        state_dict,
        verify,
    )

__all__ = [
    "__version__",
    "apply",
    "average",
    "clean",
    "convert",
    "delta",
    "diff",
    "errors",
    "fingerprint",
    "inspect",
    "load_transformers",
    "merge",
    "open",
    "plan",
    "plan_serving",
    "plan_training",
    "push",
    "scan",
    "seal",
    "state_dict",
    "verify",
]

own_packages.claim()


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Load at first use: the command line must start before anything imports numpy.
    if name == "__version__":
        from megaconv._version import __version__

        return __version__
    if name == "errors":
        from importlib import import_module

        return import_module("megaconv.errors")
    if name in __all__:
        from megaconv import api

        return getattr(api, name)
    raise AttributeError(f"module 'megaconv' has no attribute {name!r}")
