"""Anthropic's route /v1/messages. Its requests become requests of a chat, and its answers list their parts."""
