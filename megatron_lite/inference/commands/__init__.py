"""The flags of each inference command. These modules don't import torch."""
