"""Tests of megatron_lite.models.state_space."""
