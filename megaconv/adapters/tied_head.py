"""The changes of a tied head that repeat the embedding's: peft 0.21 writes both with `ensure_weight_tying`.

In the computation of peft, each of them counts once. `merge_and_unload` of peft 0.21.2 adds both to the shared tensor.
If the base has 16 bits, peft trains the two apart, so that they differ.

    embedding      lora_embedding_A [r, vocabulary], lora_embedding_B [hidden, r]
    head           lora_B [vocabulary, r] is the transpose of the first, lora_A [r, hidden] of the second
    whole tensors  the same tensor under both names

Source: peft 0.21.2, tuners/lora/model.py.
"""

from collections.abc import Callable
from dataclasses import replace

from megaconv.adapters.derived import Transposed, are_equal
from megaconv.adapters.peft_files import Adapter, AdapterConfig, ModuleAdapter, module_path


def without_repeats(
    adapter: Adapter,
    parts_of: Callable[[str], tuple[frozenset[str], bool]],
    path_of: Callable[[ModuleAdapter], str],
) -> Adapter:
    """The adapter without changes of a tied head that repeat the embedding's. Changes that differ stay.

    parts_of: (canonical tensors, True for a duplicate) of a tensor's name. path_of: the path of a module in the model.
    Reads the compared tensors.
    """
    if not adapter.config.keeps_tie:
        return adapter
    wholes = {name: parts_of(name) for name in adapter.replaced}
    own_wholes = {
        parts: adapter.replaced[name] for name, (parts, again) in wholes.items() if not again
    }
    replaced = {
        name: tensor
        for name, tensor in adapter.replaced.items()
        if not wholes[name][1]
        or wholes[name][0] not in own_wholes
        or not are_equal((tensor, own_wholes[wholes[name][0]]))
    }
    held = [(module, *parts_of(f"{path_of(module)}.weight")) for module in adapter.modules]
    own = {parts: module for module, parts, again in held if not again}
    modules = tuple(
        module
        for module, parts, again in held
        if not again or parts not in own or not _repeats(module, own[parts], adapter.config)
    )
    return replace(adapter, replaced=replaced, modules=modules)


def _repeats(head: ModuleAdapter, embedding: ModuleAdapter, config: AdapterConfig) -> bool:
    """True if the head's matrices are the embedding's, and both have one scale."""
    if head.embedding or not embedding.embedding or head.magnitude or embedding.magnitude:
        return False
    rank = head.a.shape[0]
    scales = {config.scale_of(module_path(each.module), rank) for each in (head, embedding)}
    return (
        len(scales) == 1
        and are_equal((head.a, Transposed(embedding.b)))
        and are_equal((head.b, Transposed(embedding.a)))
    )
