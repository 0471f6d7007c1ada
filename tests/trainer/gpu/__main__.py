"""Shows what `make test-gpu` will test, and ends with an error if torch finds no GPU: all tests would be skipped.

python -m tests.trainer.gpu
"""

from importlib import metadata

import torch

OPTIONAL = {
    "flash-attn": "FlashAttention 2",
    "flash-attn-4": "FlashAttention 4",
    "transformer-engine": "FP8 by Transformer Engine",
    "mamba-ssm": "scans of Mamba 2",
    "causal-conv1d": "convolutions of mixers with a state",
    "fla-core": "delta rules",
    "h5py": "rewards, reward models, BERT, T5 and Retro by commands",
}
"""Packages that some tests need, and what these tests are about."""


def main() -> None:
    """Print the devices and the packages."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} finds no CUDA device: does nvidia-smi show one, and is its driver as new as the "
            f"CUDA of this torch ({torch.version.cuda})?"
        )
    count = torch.cuda.device_count()
    print(f"torch {torch.__version__}, {count} x {torch.cuda.get_device_name()}")
    for size in (2, 4, 8):
        if count < size:
            print(f"skipped: {size} ranks on NCCL, which need {size} GPUs")
    for package, subject in OPTIONAL.items():
        try:
            print(f"{package} {metadata.version(package)}: {subject}")
        except metadata.PackageNotFoundError:
            print(f"skipped: {subject} (pip install {package})")


if __name__ == "__main__":
    main()
