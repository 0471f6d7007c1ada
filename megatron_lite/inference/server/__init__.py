"""A model behind HTTP: OpenAI's routes and Megatron's, one running batch behind all of them."""
