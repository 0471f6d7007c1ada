"""DiffLlama's heads work in pairs, which sizes and layouts have to leave together."""

import pytest

from megaconv.errors import CorruptCheckpoint, LayoutError
from megaconv.model.layout import Layout
from megatron_lite.models.trainable import check_trained
from megatron_lite.settings.options import ModelOptions
from tests.config_models import raw_config, read


def test_an_odd_number_of_key_value_heads_is_refused() -> None:
    raw = raw_config("diffllama", num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(CorruptCheckpoint, match=r"num_key_value_heads should be even.*found 3"):
        read(raw)


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_ranks_have_whole_pairs(tp: int) -> None:
    config = read(raw_config("diffllama", num_attention_heads=8, num_key_value_heads=4))
    check_trained(config, Layout(tp), ModelOptions("float32"), sequence=False)


def test_tensor_ranks_that_would_share_a_pair_are_refused() -> None:
    config = read(raw_config("diffllama", num_attention_heads=8, num_key_value_heads=4))
    with pytest.raises(LayoutError, match=r"2 pairs of key/value heads.*\(tp\) = 4"):
        check_trained(config, Layout(4), ModelOptions("float32"), sequence=False)
