"""megatron_lite: the parallel trainer that produces and consumes the checkpoints megaconv converts."""
