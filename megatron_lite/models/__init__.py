"""What is computed: layers, attention, positions, loss."""
