"""Optional kernels: our calls fit every version's signature, and give what the chunked scans in torch give.

Stubs with the packages' signatures compute what the packages' documentation says. No package is needed.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.mixers import convolution, gated_delta_net, kimi_delta_attention
from megatron_lite.models.state_space import gated_delta, kernels, kimi_delta, mamba2
from megatron_lite.models.state_space.gated_delta import gated_delta_rule
from megatron_lite.models.state_space.kernels import (
    CONVOLUTION,
    DELTA,
    KIMI_DELTA,
    SCAN,
    Package,
    convolution_by,
    delta_by,
    installed,
    scan_by,
)
from megatron_lite.models.state_space.kimi_delta import kimi_delta_rule
from megatron_lite.models.state_space.mamba2 import ssd
from megatron_lite.models.state_space.short_convolution import last_inputs, short_convolution
from tests.library_signatures import WITH_STATES, signatures, stub
from tests.trainer.parallel.small import Case, make_engine
from tests.trainer.parallel.small import step as one_step
from tests.trainer.state_space.test_scans import (
    SHAPES,
    Shape,
    draws,
    numbers_of,
    of_delta,
    of_kimi,
    of_mamba,
)

PACKAGES = {package.module: package for package in (SCAN, CONVOLUTION, DELTA, KIMI_DELTA)}
VERSIONS = [
    (module, version) for module, (_, _, versions) in WITH_STATES.items() for version in versions
]


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package is installed but for the stubs of a test."""
    installed.cache_clear()
    for module in PACKAGES:
        monkeypatch.setitem(sys.modules, module, None)
    yield
    installed.cache_clear()


Rule = Callable[..., tuple[Tensor, Tensor]]
RULES = {DELTA: (gated_delta_rule, of_delta), KIMI_DELTA: (kimi_delta_rule, of_kimi)}
"""The packages' delta rules -> ours, and its inputs."""


def scan_of_mamba_ssm(**given: Any) -> tuple[Tensor, Tensor]:
    assert given["return_final_states"]
    inputs = (given[name] for name in ("x", "dt", "A", "B", "C", "D"))
    documents = given["seq_idx"]
    assert documents is None or (documents.dtype == torch.int32 and not documents[:, 0].any())
    return ssd(
        *inputs, chunk=given["chunk_size"], documents=documents, state=given["initial_states"]
    )


def rule_of_fla(rule: Rule, **given: Any) -> tuple[Tensor, Tensor]:
    """Queries are scaled inside. Documents are those of one row, each with its own last state."""
    assert given["output_final_state"]
    q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
    assert q.shape[2] == v.shape[2], "earlier versions need as many key heads as heads"
    ends = given["cu_seqlens"]
    if ends is None:
        return rule(q * given["scale"], k, v, g, beta, state=given["initial_state"])
    assert len(q) == 1
    parts = [
        rule(*(each[:, start:end] for each in (q * given["scale"], k, v, g, beta)))
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])


def convolution_of_causal_conv1d(**given: Any) -> Tensor:
    assert given["activation"] == "silu"
    assert given["x"].stride(1) == 1, "channels are adjacent"
    by_token = given["x"].permute(2, 0, 1)
    made, _ = short_convolution(
        by_token, given["weight"].unsqueeze(1), given["bias"], documents=given["seq_idx"],
        before=given["initial_states"],
    )  # fmt: skip
    return F.silu(made).permute(1, 2, 0)


BODIES: dict[str, Callable[..., Any]] = {
    SCAN.module: scan_of_mamba_ssm,
    DELTA.module: partial(rule_of_fla, gated_delta_rule),
    KIMI_DELTA.module: partial(rule_of_fla, kimi_delta_rule),
    CONVOLUTION.module: convolution_of_causal_conv1d,
}


def kernel(monkeypatch: pytest.MonkeyPatch, module: str, version: str) -> Callable[..., Any]:
    """Install a stub with the signature of a version, and return what we find."""
    package = PACKAGES[module]
    parameters = signatures("with states")[module][version][package.function]
    function = stub(parameters, BODIES[module])
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{package.function: function}))
    installed.cache_clear()
    found = installed(package)
    assert found is not None, "our call doesn't fit the signature"
    return found


def with_defaults(body: Callable[..., Any], package: Package) -> Callable[..., Any]:
    """A kernel that gets all of our arguments by name."""
    _, function, versions = WITH_STATES[package.module]
    parameters = signatures("with states")[package.module][versions[-1]][function]
    return stub(parameters, body)


@pytest.mark.parametrize(("module", "version"), VERSIONS)
def test_our_calls_fit_every_version(
    monkeypatch: pytest.MonkeyPatch, module: str, version: str
) -> None:
    found = kernel(monkeypatch, module, version)
    shape = SHAPES[1]
    if module == SCAN.module:
        *inputs, state = of_mamba(shape)
        assert_close(
            scan_by(found, *inputs, chunk=8, documents=None, state=state),
            ssd(*inputs, chunk=8, state=state),
        )
    elif PACKAGES[module] in RULES:
        rule, inputs_of = RULES[PACKAGES[module]]
        *inputs, state = inputs_of(shape)
        assert_close(
            delta_by(found, *inputs, documents=None, state=state), rule(*inputs, state=state)
        )
    else:
        x, weight, bias = (draws(torch.float64)(*size) for size in ((9, 2, 8), (8, 1, 4), (8,)))
        made = convolution_by(found, x, weight, bias, documents=None, before=None)
        assert_close((made,), (F.silu(short_convolution(x, weight, bias)[0]),))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Our calls pass decays in float32."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_the_results_of_the_scans_in_torch(shape: Shape) -> None:
    documents = numbers_of(shape)
    by_mamba = with_defaults(BODIES[SCAN.module], SCAN)
    for state_too in (False, True):
        if state_too and documents is not None:
            continue  # no kernel is chosen then
        *inputs, state = of_mamba(shape, torch.float32)
        given = {"documents": documents, "state": state if state_too else None}
        found = scan_by(by_mamba, *inputs, chunk=8, **given)
        assert_close(found, ssd(*inputs, chunk=8, **given))
        for package, (rule, inputs_of) in RULES.items():
            *inputs, state = inputs_of(shape, torch.float32)
            given = {"documents": documents, "state": state if state_too else None}
            by_fla = with_defaults(BODIES[package.module], package)
            assert_close(delta_by(by_fla, *inputs, **given), rule(*inputs, **given))


@pytest.mark.parametrize("documents", [None, ((4, 1, 1, 14), (20,))])
def test_a_convolution_by_a_kernel_is_the_one_in_torch(
    documents: tuple[tuple[int, ...], ...] | None,
) -> None:
    by_package = with_defaults(BODIES[CONVOLUTION.module], CONVOLUTION)
    x, weight, bias = (draws(torch.float32)(*size) for size in ((20, 2, 8), (8, 1, 4), (8,)))
    numbers = numbers_of(Shape(2, 20, 1, 1, 1, 1, 1, documents))
    before = None if documents else torch.ones(2, 8, 3)
    made = convolution_by(by_package, x, weight, bias, documents=numbers, before=before)
    y, last = short_convolution(x, weight, bias, documents=numbers, before=before)
    assert_close((made,), (F.silu(y),))
    assert torch.equal(last_inputs(x, 4, before), last)


@pytest.mark.parametrize(
    ("name", "scan"), [("hybrid", SCAN), ("delta nets", DELTA), ("kimi", KIMI_DELTA)]
)
def test_a_model_trains_by_kernels_as_by_torch(
    name: str, scan: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has packed rows, and includes the backward pass."""
    case = Case(name)
    plain = one_step(make_engine(case), case, 0)
    called = []

    def chosen(package: Package) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            with monkeypatch.context() as patch:  # the stub computes with the scans in torch
                for place, choice in choices:
                    patch.setattr(place, choice, lambda *_: None)
                called.append(package.function)
                return BODIES[package.module](**given)

        return with_defaults(run, package)

    choices = (
        (mamba2, "scan_kernel"), (gated_delta, "delta_kernel"), (kimi_delta, "kimi_delta_kernel"),
        (convolution, "convolution_kernel"),
    )  # fmt: skip
    packages = (SCAN, DELTA, KIMI_DELTA, CONVOLUTION)
    for (place, choice), package in zip(choices, packages, strict=True):
        function = chosen(package)
        monkeypatch.setattr(place, choice, lambda *_, function=function: function)
    found = one_step(make_engine(case), case, 0)
    assert (found.loss, found.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=1e-4)
    assert {scan.function, CONVOLUTION.function} == set(called)


@pytest.mark.parametrize(
    ("name", "mixer", "rule_of"),
    [
        ("delta nets", gated_delta_net, "gated_delta_rule"),
        ("kimi", kimi_delta_attention, "kimi_delta_rule"),
    ],
)
def test_all_layers_give_the_same_ends_of_documents(
    name: str, mixer: ModuleType, rule_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-linear-attention waits for the GPU to read them, once for each tensor that it gets."""
    kept, plain = [], getattr(mixer, rule_of)

    def rule(*inputs: Tensor, ends: Tensor | None, **given: Any) -> Any:
        if ends is not None:
            kept.append(ends)
        return plain(*inputs, ends=ends, **given)

    monkeypatch.setattr(mixer, rule_of, rule)
    case = Case(name)
    one_step(make_engine(case), case, 0)
    assert len(kept) >= 3, "layers with packed rows"
    assert len({id(ends) for ends in kept}) == 1
    assert kept[0].dtype == torch.int64
    assert kept[0].tolist() == [0, 5, 16, 32]


def test_a_kernel_gets_the_ends_of_documents_that_all_layers_share() -> None:
    """Ends that it finds in the documents itself cost one more wait for the GPU in each layer."""
    got = []

    def rule(**given: Any) -> Any:
        got.append(given["cu_seqlens"])
        return BODIES[DELTA.module](**given)

    documents = ((4, 1, 1, 14), (20,))
    shape = Shape(2, 20, 1, 1, 1, 1, 1, documents)
    *inputs, _ = of_delta(shape, torch.float32)
    ends = torch.tensor([0, 4, 5, 6, 20, 40])
    numbers = numbers_of(shape)
    by_fla = with_defaults(rule, DELTA)
    found = delta_by(by_fla, *inputs, documents=numbers, ends=ends, state=None)
    assert_close(found, delta_by(by_fla, *inputs, documents=numbers, state=None))
    given, from_documents = got
    assert given is ends
    assert torch.equal(from_documents, ends)


def test_no_package_is_imported_for_a_tensor_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention can be imported without a GPU, and fails at its first call."""

    def never(_: str) -> Any:
        raise AssertionError("a package was imported")

    monkeypatch.setattr(kernels, "import_module", never)
    x = torch.zeros(2, 8, 4, 8, dtype=torch.bfloat16)
    assert kernels.scan_kernel(x, None, None) is None
    assert kernels.delta_kernel(x, x, None, None) is None
    assert kernels.kimi_delta_kernel(x, x, None, None) is None
    assert kernels.convolution_kernel(x[0], 4, None, None) is None


def test_a_package_whose_function_does_not_fit_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, SCAN.module, SimpleNamespace(mamba_chunk_scan_combined=lambda x, dt: x)
    )
    assert installed(SCAN) is None
    assert installed(DELTA) is None
