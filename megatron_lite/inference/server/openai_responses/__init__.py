"""OpenAI's route /v1/responses. Its requests become requests of a chat, and its answers list their parts."""
