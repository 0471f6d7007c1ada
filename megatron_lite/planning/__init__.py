"""What a run would take, before anything is started: memory of each rank, bytes between ranks, the pipeline's bubble."""
