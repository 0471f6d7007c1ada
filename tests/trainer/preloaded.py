"""Modules and data in the memory of the trainer's test processes before they are forked: slow to import, and the same
for all.

Every process of a training run asks for all families and shuffles the samples of the mock dataset. Megatron's mock dataset
has 200 million tokens, of which the tests train on a few hundred: theirs has fewer documents.
"""

import gc

import torch.distributed.checkpoint  # noqa: F401

import megatron_lite.commands.command_line
import megatron_lite.engine
import megatron_lite.loop.session  # noqa: F401
from megaconv import registry
from megaconv.families import families
from megatron_lite.data import mock
from tests import unsynced

mock.DOCUMENTS = 1000
unsynced.install()
families()
registry.all_loaders()
registry.all_savers()
gc.collect()
gc.freeze()  # a forked process does not copy what the collector would look at
