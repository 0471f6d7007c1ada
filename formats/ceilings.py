"""Limits of the sizes that a file declares, each with its reason. They are checked before anything of that size is read
or made.

Sizes are in bytes unless stated otherwise. Each limit is at least four times the value of the largest published model
(tests/formats/test_ceilings.py lists the published values). megaconv refuses a hostile file of a few megabytes within
seconds, and with less than 500 MB of memory. A larger pickle takes at most 60 times its size, and a larger JSON file at
most 30 times. The limits of numbers that describe a model are in megaconv/model/ceilings.py.
"""

CONFIG_BYTES = 8 << 20
"""config.json, params.json, metadata.json, `.zarray`: some kilobytes. A vision model that names 22,000 classes has 1.7
MB."""

TRACKER_BYTES = 4096
"""A tracker file: it holds one word."""

INDEX_BYTES = 96 << 20
"""`*.index.json`: 23 MB for the 210,000 tensors of the largest model published in such files. It has a trillion
parameters in 4 bits, with scales and shapes next to the weights."""

HEADER_BYTES = 32 << 20
"""The header of a safetensors file: some 130 bytes per tensor, so 240,000 tensors in one file. The safetensors library
accepts 100 MB, but the Python values of such a header take two gigabytes. Models of more than some ten thousand tensors
come in many files."""

HEADER_VALUES = 1_500_000
"""Separators `[`, `{`, `:` and `,` of a safetensors header: some twelve per tensor. The value behind each separator
takes up to 200 bytes as a Python object."""

RECORD_BYTES = 256 << 20
"""megaconv.json: some 220 bytes per tensor, and four tensors per parameter with optimizer state. A model of a trillion
elements has 70,000 parameters, and so 62 MB."""

SIGNATURE_BYTES = 32 << 20
"""model.sig, a sigstore bundle: some 220 bytes per signed file, so 150,000 files. Only zarr has that many."""

TREE_BYTES = 64 << 20
"""`_METADATA` of an Orbax tree: some 600 bytes per array, so 100,000 arrays."""

JSON_DEPTH = 100
"""Levels of a JSON document: a tokenizer has eight."""

JSON_VALUES = 100_000
"""Separators `[`, `{`, `:` and `,` of any JSON document, plus one for every JSON_VALUE_BYTES of the document. A larger
document may hold more values, but must not consist of brackets alone. A value takes up to 90 bytes as a Python object.
"""

JSON_VALUE_BYTES = 3
"""Bytes of a JSON document for each separator. A tokenizer's merges, as lists of two without white space, have five."""

SIDECAR_BYTES = 160 << 20
"""A tokenizer file or another small file, which is held in memory until it is written. The largest published files have
35 MB."""

PICKLE_BYTES = 160 << 20
"""A pickle, without the tensors. `.metadata` has some 140 bytes per chunk, so this is a million chunks."""

PICKLE_VALUES = 100_000
"""Containers and objects of a pickle, and the same number of references back, plus one for every PICKLE_VALUE_BYTES of
the pickle. A container takes up to 250 bytes as a Python object."""

PICKLE_VALUE_BYTES = 4
"""Bytes of a pickle for each container. Checkpoints have 6.5 or more."""

DIRECTORY_BYTES = 64 << 20
"""The directory of a zip archive: some 110 bytes per storage, so 600,000 tensors in one torch file."""

GGUF_HEADER_BYTES = 128 << 20
"""The part of a GGUF file before its tensors: 18 MB with a vocabulary of 262,000 and its merges."""

GGUF_ENTRIES = 100_000
"""Keys of a GGUF file, and the same number of tensors. Files have some thousands, since experts are stacked."""

GGUF_STRINGS = 4_000_000
"""Strings in arrays of a GGUF file: the words of a vocabulary and its merges. The largest published file has 777,000
(Gemma 3)."""

YAML_BYTES = 1 << 20
"""run_config.yaml, model.yaml: some 30 kilobytes of settings."""

YAML_VALUES = 20_000
"""Values of a YAML document, keys included. The value of an alias counts every time that it is named. A run's settings
have 2,000 values. Without libyaml, PyYAML reads ten thousand values a second."""

YAML_DEPTH = 64
"""Levels of a YAML document: a run's settings have six."""

YAML_NUMBER = 400
"""Characters of a number in YAML. Reading a number in base 60 takes time by the square of its length, and a long number
in base 16 can't be printed."""

AXES = 64
"""Axes of a tensor: numpy's limit. torch's models have up to five."""

AXIS = (1 << 61) - 1
"""Elements along one axis, exclusive. Larger numbers have the hashes of smaller ones in Python, so that a file could make
sets of offsets slow."""

LISTED_OBJECTS = 1_400_000
"""Objects below a prefix of a store. A large model in zarr has one for each of some 300,000 chunks."""
