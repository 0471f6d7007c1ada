"""GPUs by name: memory, peak rates and bandwidths, per GPU, from public data sheets.

Rates are dense; data sheets that count sparsity tell twice as much. Link rates count one direction. The network is
that of the usual server: one adapter for each GPU. `plan` and the MFU of a run read this table.
"""

from dataclasses import dataclass

from megaconv.errors import UsageError

GB, TERA = 10**9, 10**12
"""Data sheets count in powers of ten."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual server."""

    name: str
    memory: int
    """Bytes."""
    bf16: float
    """Dense bf16 operations per second."""
    fp8: float | None
    """Dense FP8 operations per second; None if the GPU has no FP8 products."""
    bandwidth: float
    """Bytes per second of the memory."""
    nvlink: float
    """Bytes per second to the other GPUs of the node, one direction."""
    network: float
    """Bytes per second to other nodes, one direction."""
    host: float
    """Bytes per second to the main memory, one direction."""
    node: int = 8
    """GPUs that the fast links join."""
    words: tuple[str, ...]
    """Parts of the device's name, as the driver tells it. The first entry of the table with all its words counts."""
    source: str

    @property
    def data_sheet(self) -> str:
        """The figures of the data sheet, for people."""
        memory = f"{self.memory / self.unit:g} GB at {self.bandwidth / TERA:g} TB/s"
        return f"{' '.join(self.words)}: {self.bf16 / TERA:g} TFLOP/s in bf16, {memory}"

    @property
    def unit(self) -> int:
        """Bytes of a gigabyte in the data sheet: some count memory in powers of two."""
        return GIB if self.memory % GIB == 0 else GB

    def peak(self, *, fp8: bool) -> float:
        """Return the peak rate of products. Raises UsageError for FP8 on a GPU without it."""
        if not fp8:
            return self.bf16
        if self.fp8 is None:
            raise UsageError(f"--gpu {self.name} has no FP8 products; leave --fp8 out")
        return self.fp8


_HOPPER = "NVIDIA H100 data sheet; DGX H100: 8 adapters of 400 Gb/s"
_HOPPER_CARD = "NVIDIA H100 data sheet (PCIe, NVL); PCIe 5.0 x16"
_AMPERE = "NVIDIA A100 data sheet; DGX A100: 8 adapters of 200 Gb/s"
_BLACKWELL = "NVIDIA DGX B200 data sheet"
_PCIE_5, _PCIE_4 = 64 * GB, 32 * GB
"""PCIe with 16 lanes, one direction."""
_C2C = 450 * GB
"""NVLink-C2C of Grace, one direction. The two GPUs of a GB200 share it."""

_ALL = (
    # Cards, whose names also contain the word of another entry, come first.
    Gpu(
        name="h100-pcie", memory=80 * GIB, bf16=756 * TERA, fp8=1513 * TERA, bandwidth=2.0 * TERA, nvlink=_PCIE_5,
        network=50 * GB, host=_PCIE_5, words=("H100", "PCIe"), source=_HOPPER_CARD,
    ),
    Gpu(
        name="h100-nvl", memory=94 * GB, bf16=835 * TERA, fp8=1670 * TERA, bandwidth=3.9 * TERA, nvlink=300 * GB,
        network=50 * GB, host=_PCIE_5, node=2, words=("H100", "NVL"), source=_HOPPER_CARD,
    ),
    Gpu(
        name="h100", memory=80 * GIB, bf16=989.4 * TERA, fp8=1978.9 * TERA, bandwidth=3.35 * TERA, nvlink=450 * GB,
        network=50 * GB, host=_PCIE_5, words=("H100",), source=_HOPPER,
    ),
    Gpu(
        name="h800-pcie", memory=80 * GIB, bf16=756 * TERA, fp8=1513 * TERA, bandwidth=2.0 * TERA, nvlink=_PCIE_5,
        network=50 * GB, host=_PCIE_5, words=("H800", "PCIe"), source="as H100 PCIe",
    ),
    Gpu(
        name="h800", memory=80 * GIB, bf16=989.4 * TERA, fp8=1978.9 * TERA, bandwidth=3.35 * TERA, nvlink=200 * GB,
        network=50 * GB, host=_PCIE_5, words=("H800",),
        source="as H100, with NVLink of 400 GB/s in both directions: arXiv:2505.09343, section 4",
    ),
    Gpu(
        name="gh200-144gb", memory=144 * GB, bf16=989.4 * TERA, fp8=1978.9 * TERA, bandwidth=4.9 * TERA, nvlink=450 * GB,
        network=50 * GB, host=_C2C, node=1, words=("GH200", "144G"), source="NVIDIA GH200 data sheet",
    ),
    Gpu(
        name="gh200", memory=96 * GB, bf16=989.4 * TERA, fp8=1978.9 * TERA, bandwidth=4.0 * TERA, nvlink=450 * GB,
        network=50 * GB, host=_C2C, node=1, words=("GH200",), source="NVIDIA GH200 data sheet",
    ),
    Gpu(
        name="h200-nvl", memory=141 * GB, bf16=835 * TERA, fp8=1670 * TERA, bandwidth=4.8 * TERA, nvlink=450 * GB,
        network=50 * GB, host=_PCIE_5, node=4, words=("H200", "NVL"), source="NVIDIA H200 data sheet; bridges join four cards",
    ),
    Gpu(
        name="h200", memory=141 * GB, bf16=989.4 * TERA, fp8=1978.9 * TERA, bandwidth=4.8 * TERA, nvlink=450 * GB,
        network=50 * GB, host=_PCIE_5, words=("H200",), source="NVIDIA H200 data sheet",
    ),
    Gpu(
        name="h20", memory=96 * GB, bf16=148 * TERA, fp8=296 * TERA, bandwidth=4.0 * TERA, nvlink=450 * GB,
        network=50 * GB, host=_PCIE_5, words=("H20",), source="NVIDIA HGX H20 product brief",
    ),
    Gpu(
        name="a100-40gb", memory=40 * GIB, bf16=312 * TERA, fp8=None, bandwidth=1.555 * TERA, nvlink=300 * GB,
        network=25 * GB, host=_PCIE_4, words=("A100", "40GB"), source=_AMPERE,
    ),
    Gpu(
        name="a100", memory=80 * GIB, bf16=312 * TERA, fp8=None, bandwidth=2.039 * TERA, nvlink=300 * GB,
        network=25 * GB, host=_PCIE_4, words=("A100",), source=_AMPERE,
    ),
    Gpu(
        name="a800", memory=80 * GIB, bf16=312 * TERA, fp8=None, bandwidth=2.039 * TERA, nvlink=200 * GB,
        network=25 * GB, host=_PCIE_4, words=("A800",),
        source="as A100, with NVLink of 400 GB/s in both directions: NVIDIA A800 data sheet",
    ),
    Gpu(
        name="gb200", memory=186 * GB, bf16=2500 * TERA, fp8=5000 * TERA, bandwidth=8.0 * TERA, nvlink=900 * GB,
        network=50 * GB, host=_C2C / 2, node=72, words=("GB200",), source="NVIDIA GB200 NVL72 data sheet",
    ),
    Gpu(
        name="b200", memory=180 * GB, bf16=2250 * TERA, fp8=4500 * TERA, bandwidth=8.0 * TERA, nvlink=900 * GB,
        network=50 * GB, host=_PCIE_5, words=("B200",), source=_BLACKWELL,
    ),
    Gpu(
        name="l40s", memory=48 * GB, bf16=362 * TERA, fp8=733 * TERA, bandwidth=0.864 * TERA, nvlink=_PCIE_4,
        network=25 * GB, host=_PCIE_4, words=("L40S",), source="NVIDIA L40S data sheet; PCIe 4.0 x16",
    ),
    Gpu(
        name="mi300x", memory=192 * GB, bf16=1307 * TERA, fp8=2614 * TERA, bandwidth=5.3 * TERA, nvlink=448 * GB,
        network=50 * GB, host=_PCIE_5, words=("MI300X",), source="AMD Instinct MI300X data sheet and platform data sheet",
    ),
    Gpu(
        name="mi325x", memory=256 * GB, bf16=1307 * TERA, fp8=2614 * TERA, bandwidth=6.0 * TERA, nvlink=448 * GB,
        network=50 * GB, host=_PCIE_5, words=("MI325X",), source="AMD Instinct MI325X data sheet and platform data sheet",
    ),
)  # fmt: skip
DEFAULT_GPU = "h100"
GPUS = {gpu.name: gpu for gpu in _ALL}
"""Name for `--gpu` -> the GPU."""


def gpu_named(name: str) -> Gpu:
    """Return a GPU. Raises UsageError for an unknown name."""
    found = GPUS.get(name.lower())
    if found is None:
        raise UsageError(f"--gpu {name} is unknown; choose one of {', '.join(GPUS)}")
    return found


def gpu_of(device: str | None) -> Gpu | None:
    """Return the GPU of a device's name, as the driver tells it. None: a CPU or an unknown device."""
    name = device or ""
    for gpu in _ALL:
        if all(word in name for word in gpu.words):
            return gpu
    return None


def peak_tflops(device: str | None) -> float | None:
    """Return a device's dense bf16 operations per second, in units of 1e12; None for a CPU or an unknown device."""
    gpu = gpu_of(device)
    return None if gpu is None else gpu.bf16 / TERA
