"""The table of GPUs: each name of a driver finds its own entry, and the figures are plausible."""

import pytest

from megaconv.planning.gpus import GPUS, TERA, gpu_of, peak_tflops


@pytest.mark.parametrize(
    ("device", "name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 989.4), ("NVIDIA H100 PCIe", "h100-pcie", 756), ("NVIDIA H100 NVL", "h100-nvl", 835),
        ("NVIDIA H200", "h200", 989.4), ("NVIDIA H200 NVL", "h200-nvl", 835), ("NVIDIA H800", "h800", 989.4),
        ("NVIDIA GH200 480GB", "gh200", 989.4), ("NVIDIA GH200 144G HBM3e", "gh200-144gb", 989.4), ("NVIDIA H20", "h20", 148),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312), ("NVIDIA A100-SXM4-80GB", "a100", 312), ("NVIDIA B200", "b200", 2250),
        ("NVIDIA GB200", "gb200", 2500), ("NVIDIA L40S", "l40s", 362), ("AMD Instinct MI300X", "mi300x", 1307),
    ],
)  # fmt: skip
def test_each_form_of_a_gpu_has_its_own_peak(device: str, name: str, peak: float) -> None:
    found = gpu_of(device)
    assert found is not None
    assert found.name == name
    assert peak_tflops(device) == pytest.approx(peak)


def test_a_cpu_and_an_unknown_device_have_no_peak() -> None:
    assert peak_tflops("Radeon") is None
    assert peak_tflops(None) is None


@pytest.mark.parametrize("name", GPUS)
def test_every_entry_can_be_found_and_is_plausible(name: str) -> None:
    """Between 30 and 1,000 operations for each byte of bandwidth, and no entry that an earlier one hides."""
    gpu = GPUS[name]
    assert gpu_of(f"NVIDIA {' '.join(gpu.words)}") is gpu
    assert 30 < gpu.bf16 / gpu.bandwidth < 1000
    assert gpu.network <= gpu.nvlink or gpu.nvlink < 100e9
    assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02)


def test_the_text_of_a_data_sheet_has_its_units() -> None:
    assert GPUS["l40s"].data_sheet == "L40S: 362 TFLOP/s in bf16, 48 GB at 0.864 TB/s"
    assert GPUS["h100"].data_sheet == "H100: 989.4 TFLOP/s in bf16, 80 GB at 3.35 TB/s"
    assert GPUS["h100"].bf16 == 989.4 * TERA
