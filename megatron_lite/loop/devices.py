"""GPUs by name: their peak rate, memory and bandwidth, from public data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One form of a GPU."""

    word: str
    """Part of the device's name, as the driver tells it."""
    tflops: float
    """Dense bf16 operations per second, in units of 1e12. Data sheets that count sparsity tell twice as much."""
    gigabytes: tuple[int, ...]
    """Memory in units of 1e9 bytes. Some forms exist in two sizes."""
    terabytes_per_second: tuple[float, ...]
    """Bandwidth of each size's memory, in units of 1e12 bytes per second."""

    def __str__(self) -> str:
        forms = zip(self.gigabytes, self.terabytes_per_second, strict=True)
        memory = " or ".join(f"{size} GB at {speed:g} TB/s" for size, speed in forms)
        return f"{self.word}: {self.tflops:g} TFLOP/s in bf16, {memory}"


DEVICES = (
    # NVIDIA H100 Tensor Core GPU data sheet: SXM, PCIe, and NVL per card.
    Device("H100 PCIe", 756.0, (80,), (2.0,)),
    Device("H100 NVL", 835.0, (94,), (3.9,)),
    Device("H100", 989.0, (80,), (3.35,)),
    # NVIDIA H200 Tensor Core GPU data sheet. GH200 is a name with H200 in it; its GPU has 96 or 144 GB.
    Device("GH200", 989.0, (96, 144), (4.0, 4.9)),
    Device("H200 NVL", 835.0, (141,), (4.8,)),
    Device("H200", 989.0, (141,), (4.8,)),
    # The H100's forms with slower links.
    Device("H800 PCIe", 756.0, (80,), (2.0,)),
    Device("H800", 989.0, (80,), (3.35,)),
    # NVIDIA GB200 NVL72 and DGX B200 data sheets, per GPU.
    Device("GB200", 2500.0, (186,), (8.0,)),
    Device("B200", 2250.0, (180,), (8.0,)),
    # NVIDIA A100 Tensor Core GPU data sheet: SXM of both sizes. The 80 GB PCIe card has 1.935 TB/s.
    Device("A100", 312.0, (40, 80), (1.555, 2.039)),
    Device("A800", 312.0, (40, 80), (1.555, 2.039)),
    # NVIDIA L40S data sheet.
    Device("L40S", 362.0, (48,), (0.864,)),
    # AMD Instinct MI300X data sheet.
    Device("MI300X", 1307.0, (192,), (5.3,)),
)
"""The first entry whose word is in the device's name counts."""


def device_of(name: str | None) -> Device | None:
    """Return the device of a name; None for a CPU or an unknown device."""
    return next((device for device in DEVICES if device.word in (name or "")), None)


def peak_tflops(name: str | None) -> float | None:
    """Return a device's peak rate, or None for a CPU or an unknown device."""
    device = device_of(name)
    return None if device is None else device.tflops
