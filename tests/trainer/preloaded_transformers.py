"""The parts of transformers that read a tokenizer, an image processor and a model, for runs on chats and on images.

They are a module of their own: where transformers is missing, processes start without them.
"""

import gc

import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for _name in (
    "AutoTokenizer",
    "PreTrainedTokenizerFast",
    "AutoImageProcessor",
    "AutoModelForImageTextToText",
    "GenerationMixin",
):
    getattr(transformers, _name)  # transformers imports the module of a name when it is first read
get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models
gc.collect()
gc.freeze()
