"""How large what a file says may be, before anything of that size is read or made: one table, each with its reason.

Sizes in bytes unless stated otherwise. A hostile file of a few megabytes is refused within seconds and
500 MB, whatever is in it, and a larger pickle takes no more than 60 times its size; numbers that
describe a model have their table in megaconv/model/ceilings.py.
"""

CONFIG_BYTES = 4 << 20
"""config.json, params.json, metadata.json, `.zarray`: some kilobytes; a megabyte where a vision model names 20,000 classes."""

TRACKER_BYTES = 4096
"""A tracker holds one word."""

INDEX_BYTES = 32 << 20
"""`*.index.json`: 14 MB for the 140,000 tensors of the largest model that is published in such files (a trillion parameters)."""

HEADER_BYTES = 32 << 20
"""The header of a safetensors file: some 130 bytes a tensor, so 240,000 tensors in one file. The safetensors library takes
100 MB, but Python's values of such a header take two gigabytes, and models of more than some ten thousand tensors come in
many files."""

RECORD_BYTES = 64 << 20
"""megaconv.json: some 200 bytes a tensor, and four tensors a parameter with optimizer state."""

JSON_TEXT_BYTES = 64 << 20
"""Of a JSON document as Python holds it: a character that isn't ASCII makes all of them four bytes wide."""

JSON_VALUES = 1_500_000
"""Separators `[`, `{`, `:` and `,` of a JSON document: each value behind one takes up to 200 bytes as a Python object."""

SIDECAR_BYTES = 64 << 20
"""A tokenizer file that travels along, and is held in memory until it is written; the largest published have 35 MB."""

PICKLE_BYTES = 128 << 20
"""A pickle: tensors lie outside. `.metadata` has some 140 bytes a chunk, so this is a million of them."""

PICKLE_VALUES = 100_000
"""Containers and objects of a pickle, and as many things that it refers back to, with one more for every PICKLE_VALUE_BYTES of
it: a container takes up to 250 bytes as a Python object."""

PICKLE_VALUE_BYTES = 4
"""Of a pickle, for each container in it: checkpoints have from 6.5 on."""

GGUF_HEADER_BYTES = 64 << 20
"""What comes before a GGUF file's tensors: 16 MB with a vocabulary of 262,000 and its merges."""

GGUF_ENTRIES = 100_000
"""Keys of a GGUF file, and as many tensors: some thousands, since experts are stacked."""

GGUF_STRINGS = 2_000_000
"""In arrays of a GGUF file: words of a vocabulary, and its merges."""

YAML_BYTES = 1 << 20
"""run_config.yaml, model.yaml: some 30 kilobytes of settings."""

YAML_VALUES = 20_000
"""Of a YAML document, keys included, with what an alias stands for as often as it is named; a run's settings have 2,000. Where
PyYAML has no libyaml it reads ten thousand a second."""

YAML_DEPTH = 64
"""Levels of a YAML document; a run's settings have six."""

YAML_NUMBER = 400
"""Characters of a number in YAML: one in base 60 takes time by the square of them, one in base 16 can't be shown."""

AXES = 64
"""Of a tensor: numpy's limit; torch's models have up to five."""

AXIS = 1 << 63
"""Elements along one axis, exclusive: what torch's and safetensors' 64-bit numbers hold."""
