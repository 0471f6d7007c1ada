"""The commands that don't train."""

OTHERS = {
    "plan": "megatron_lite.planning.command",
    "preprocess": "megatron_lite.data.preprocess",
    "data": "megatron_lite.data.recipes.command",
    "models": "megatron_lite.commands.models",
    "recipes": "megatron_lite.commands.recipes",
    "plot": "megatron_lite.commands.plot",
    "completion": "megatron_lite.commands.completion",
    "generate": "megatron_lite.inference.commands.generate",
    "chat": "megatron_lite.inference.commands.chat",
    "score": "megatron_lite.inference.commands.score",
    "serve": "megatron_lite.inference.commands.serve",
    "evaluate": "megatron_lite.inference.commands.evaluate",
    "retro": "megatron_lite.retrieval.commands.retro",
    "embed": "megatron_lite.inference.commands.embed",
    "retrieve": "megatron_lite.retrieval.commands.retrieve",
    "rank-layers": "megatron_lite.inference.commands.rank_layers",
    "rank-experts": "megatron_lite.inference.commands.rank_experts",
    "rank-channels": "megatron_lite.inference.commands.rank_channels",
    "calibrate": "megatron_lite.inference.commands.calibrate",
}
"""Commands that don't train -> the module whose main(words) returns the exit status."""

WITHOUT_TORCH = ("plan", "models", "recipes", "plot", "completion")
"""Commands that import neither torch nor numpy."""
