"""An HTTP server for a model: OpenAI's and Megatron's routes on one running batch."""
