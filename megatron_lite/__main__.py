"""`python -m megatron_lite`, which is what torchrun starts."""

from megatron_lite.cli import main

main()
