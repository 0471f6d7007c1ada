"""FlashAttention 2, 3 and 4: the choice, and our calls against the signatures of the real packages."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.models import attention, flash
from megatron_lite.models.flash import MODULES, Kernel, kernel_for, kernel_of
from megatron_lite.models.passes import Packed
from tests.library_signatures import FLASH, FLASH_FUNCTIONS, Parameters, signatures, stub

GPU = torch.device("cuda")
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
VERSIONS = [(module, version) for module, (_, versions) in FLASH.items() for version in versions]
OLD = ("flash_attn.cute", "v2.8.3")
"""The first FlashAttention 4: without `deterministic` and lengths."""
NUMBERS = {module: number for number, module in MODULES.items()}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No FlashAttention is installed but for the stubs of a test."""
    kernel_of.cache_clear()
    for module in ("flash_attn", *MODULES.values()):
        monkeypatch.setitem(sys.modules, module, None)
    yield
    kernel_of.cache_clear()


def first_tensor(**arguments: Any) -> Any:
    return arguments["q"]


def install(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    version: str,
    body: Callable[..., Any] = first_tensor,
) -> None:
    """Install functions with the signatures of a version."""
    functions: dict[str, Parameters] = signatures("flash-attention")[module][version]
    made = {name: stub(functions[name], body) for name in FLASH_FUNCTIONS}
    if module == "flash_attn.cute":
        namespace = ModuleType("flash_attn")  # a namespace package, without functions
        monkeypatch.setitem(sys.modules, "flash_attn", namespace)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**made))


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


def chosen(*, width: int = 128, dropout: bool = False) -> int | None:
    kernel: Kernel | None = kernel_for(GPU, width=width, dropout=dropout)
    return None if kernel is None else kernel.version


@pytest.mark.parametrize(("module", "version"), VERSIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("window", [None, 3])
def test_our_calls_fit_every_version(
    monkeypatch: pytest.MonkeyPatch, module: str, version: str, dropout: float, window: int | None
) -> None:
    seen: list[dict[str, Any]] = []

    def kernel(**arguments: Any) -> tuple[torch.Tensor, None]:
        seen.append(arguments)
        return arguments["q"], None

    install(monkeypatch, module, version, kernel)
    found = kernel_of(NUMBERS[module])
    if (module, version) == OLD:
        assert found is None
        return
    assert found is not None
    x = torch.randn(4, 1, 2, 8)
    packed = Packed([[3, 1]], x.device)
    assert torch.equal(found.attend(x, x, x, window, dropout, None), x)
    flat = x[:, 0]
    assert torch.equal(found.attend_packed(flat, flat, flat, packed, window, dropout, 0.5), flat)
    none = (None, None) if found.version == 4 else (-1, 0)
    for arguments in seen:
        assert arguments["causal"] is True
        assert arguments["window_size"] == (none if window is None else (2, 0))
        assert arguments.get("dropout_p") == (dropout if found.version == 2 else None)
    assert seen[1]["max_seqlen_q"] == 3
    assert seen[1]["cu_seqlens_k"].tolist() == [0, 3, 4]


def test_flash_attention_4_alone_is_not_taken_for_2(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn.cute", "0251105a")
    assert kernel_of(2) is None
    for capability, version in ((AMPERE, None), (HOPPER, 4), (BLACKWELL, 4)):
        on_gpu(monkeypatch, capability)
        assert chosen() == version


def test_each_gpu_gets_its_best_version_and_dropout_the_one_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "flash_attn.cute", "0251105a")
    install(monkeypatch, "flash_attn", "v2.8.3")
    install(monkeypatch, "flash_attn_interface", "v2.8.3")
    for capability, version in ((AMPERE, 2), (HOPPER, 3), (BLACKWELL, 4), ((12, 0), 2)):
        on_gpu(monkeypatch, capability)
        assert chosen() == version
        assert chosen(dropout=True) == 2
    on_gpu(monkeypatch, (7, 5))
    assert chosen() is None


@pytest.mark.parametrize(
    ("width", "on_hopper", "on_blackwell"),
    [(128, 3, 4), (100, 2, 2), (192, 3, 2), (256, 3, 2), (264, None, None)],
)
def test_a_version_gets_only_heads_that_it_computes(
    monkeypatch: pytest.MonkeyPatch, width: int, on_hopper: int | None, on_blackwell: int | None
) -> None:
    """FlashAttention 2 pads heads that are no multiple of 8. No version computes more than 256 elements."""
    install(monkeypatch, "flash_attn.cute", "0251105a")
    install(monkeypatch, "flash_attn", "v2.8.3")
    install(monkeypatch, "flash_attn_interface", "v2.8.3")
    for capability, version in ((HOPPER, on_hopper), (BLACKWELL, on_blackwell)):
        on_gpu(monkeypatch, capability)
        assert chosen(width=width) == version


def test_a_package_that_cannot_be_loaded_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> ModuleType:
        raise OSError("undefined symbol")

    monkeypatch.setattr(flash, "import_module", broken)
    assert kernel_of(2) is None


def test_a_version_that_requires_more_arguments_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = signatures("flash-attention")["flash_attn_interface"]["v2.8.3"]
    required = [{"name": "more", "kind": "KEYWORD_ONLY"}]
    made = {name: stub([*functions[name], *required], first_tensor) for name in FLASH_FUNCTIONS}
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(**made))
    assert kernel_of(3) is None


def test_flash_is_refused_for_dtypes_that_it_can_not_compute() -> None:
    """Without FlashAttention, PyTorch has such a kernel. A CPU has only one kernel, and uses it."""
    x = torch.zeros(4, 1, 2, 8)
    for backend in ("auto", "flash", "fused", "unfused", "local"):
        assert attention.choose(backend, x, x, 0.0) is None
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    with pytest.raises(UsageError, match="--attention-backend flash needs --bf16 or --fp16"):
        attention.choose("flash", on_gpu, on_gpu, 0.0)  # type: ignore[arg-type]


def test_flash_attention_is_only_made_deterministic_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def kernel(**arguments: Any) -> Any:
        asked.append(arguments["deterministic"])
        return arguments["q"]

    install(monkeypatch, "flash_attn", "v2.6.0", kernel)
    found = kernel_of(2)
    assert found is not None
    x = torch.zeros(4, 1, 2, 8)
    found.attend(x, x, x, None, 0.0, None)
    try:
        torch.use_deterministic_algorithms(True)
        found.attend(x, x, x, None, 0.0, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True]
