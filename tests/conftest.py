"""Shared by all tests: where the fixtures are, and small models to convert."""

import logging
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.megatron_oracle import Megatron

# The same examples in every run, so that a change is judged by what it changed; `make explore` looks for new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("same")

# A shell that starts the tests in the background, or nohup, has them ignore these, and every process that a test starts too.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def _warnings_are_shown() -> None:
    """Tests share a process, and the fuzzer and comparisons of many models silence warnings."""
    logging.disable(logging.NOTSET)
    for package in ("megaconv", "megatron_lite", "loaders", "savers", "formats"):
        logging.getLogger(package).setLevel(logging.NOTSET)


GRIDS = {
    "tests/trainer/inference/test_adapters.py::test_two_ranks_generate_with_the_adapter": 2,
    "tests/trainer/loop/test_further_optimizer.py::test_a_further_optimizer_trains_saves_and_goes_on_to_the_same_bits": 2,
    "tests/trainer/loop/test_starts.py::test_a_run_goes_on_in_its_precision_unless_a_flag_says_another": 2,
    "tests/trainer/loop/test_run_directory.py::test_no_command_saves_over_the_run_of_another": 2,
    "tests/trainer/loop/test_run_directory.py::test_a_disk_without_room_for_a_checkpoint_is_found_before_the_first_step": 2,
    "tests/families/test_same_function.py::test_every_field_comes_back_from_config_json_or_is_refused_by_name": 2,
    "tests/engine/test_write_errors.py::test_a_full_disk_at_any_call_is_told_as_such": 2,
    "tests/trainer/loop/test_failing.py::test_a_rank_that_ends_ends_the_run_with_its_cause_told_once": 2,
    "tests/trainer/planning/test_megatron_examples.py::test_a_dry_run_prints_a_command_that_misses_nothing_but_its_files": 2,
    "tests/trainer/parallel/test_transformers.py::test_two_tensor_ranks_compute_what_transformers_does": 2,
    "tests/trainer/pretended_cuda/test_same_results.py::test_each_option_trains_as_on_a_cpu": 2,
    "tests/trainer/pretended_cuda/test_several_ranks.py::test_two_ranks_train_as_on_cpus": 3,
    "tests/commands/test_hub.py::test_the_clients_bars_are_for_terminals_alone": 4,
    "tests/engine/test_interrupted.py::test_a_killed_conversion_leaves_no_output_and_the_next_one_is_as_if_nothing_had_been": 2,
    "tests/families/test_same_function.py::test_every_field_comes_back_from_megatrons_arguments_or_is_refused": 4,
    "tests/megatron/test_optimizer_chains.py::test_every_element_of_an_optimizer_comes_through_a_chain": 2,
    "tests/model/test_spellings.py::test_what_all_ranks_write_is_read_as_the_same_tensors": 2,
    "tests/trainer/inference/test_engine_model.py::test_one_process_generates_what_transformers_does": 3,
    "tests/formats/test_commit.py::test_a_commit_killed_before_any_step_leaves_one_of_the_two_outputs": 3,
    "tests/engine/test_chains.py::test_a_chain_of_conversions_comes_back_bit_for_bit": 4,
    "tests/families/test_encoders.py::test_a_bert_of_megatron_computes_the_same_at_another_layout": 8,
    "tests/families/test_families.py::test_there_and_elsewhere_and_back_every_bit_is_the_same": 5,
    "tests/megatron/test_oracles.py::test_a_checkpoint_of_megatron_computes_the_same_at_another_layout": 4,
    "tests/commands/test_hub.py::test_a_model_is_read_from_the_hub": 3,
    "tests/megatron/test_oracles.py::test_megatron_computes_what_transformers_computes": 5,
    "tests/megatron/test_oracles.py::test_megatron_loads_torch_dist_strictly_and_computes_the_same": 6,
    "tests/megatron/test_oracles.py::test_the_way_back_gives_the_same_model": 3,
    "tests/megatron/test_oracles.py::test_the_way_back_needs_nothing_but_the_rank_files": 3,
    "tests/megatron/test_oracles.py::test_what_a_variant_is_there_to_prove_moves_its_logits": 3,
    "tests/savers/test_savers.py::test_what_is_written_verifies_or_is_refused": 3,
    "tests/engine/test_write_errors.py::test_an_error_at_any_call_leaves_the_target_as_it_was": 4,
    "tests/engine/test_write_errors.py::test_an_error_at_any_other_call_ends_the_run_or_is_survived_and_leaves_nothing": 4,
    "tests/trainer/inference/test_engine_model.py::test_sharded_models_generate_what_transformers_does": 6,
    "tests/trainer/inference/test_weights.py::test_tensors_are_those_of_the_file": 5,
    "tests/trainer/loop/test_hybrid_runs.py::test_megatron_core_loads_weights_and_optimizer_strictly": 2,
    "tests/trainer/loop/test_megatron_loads.py::test_megatron_core_loads_weights_and_optimizer_strictly": 4,
    "tests/trainer/loop/test_muon_runs.py::test_a_stopped_run_goes_on_to_the_same_bits": 4,
    "tests/trainer/loop/test_sparse_runs.py::test_a_run_goes_on_and_trains_everything_but_the_indexer": 2,
    "tests/trainer/loop/test_runs.py::test_a_shared_optimizer_comes_back_with_every_bit": 6,
    "tests/trainer/parallel/test_bert.py::test_ten_steps_at_a_layout_are_megatron_cores_in_one_process": 4,
    "tests/trainer/parallel/test_context.py::test_a_layout_trains_as_one_process_does": 8,
    "tests/trainer/parallel/test_drawn_layouts.py::test_a_layout_drawn_by_chance_computes_what_one_process_does": 5,
    "tests/trainer/parallel/test_fp8.py::test_a_model_learns_in_fp8_as_in_any_rounding_of_its_precision": 4,
    "tests/trainer/parallel/test_further_tokens.py::test_rank_files_of_several_stages_hold_what_the_format_without_stages_does": 3,
    "tests/trainer/parallel/test_layouts.py::test_a_layout_trains_as_one_process_does": 5,
    "tests/trainer/parallel/test_mixtures.py::test_ten_steps_at_a_layout_are_megatron_cores_in_one_process": 5,
    "tests/trainer/parallel/test_mixers.py::test_a_model_of_two_dtypes_trains_as_in_one_process_and_resumes_bit_for_bit": 4,
    "tests/trainer/parallel/test_preference.py::test_ten_steps_are_those_of_plain_torch": 3,
    "tests/trainer/parallel/test_qk_clip.py::test_every_layout_clips_as_one_process_does": 3,
    "tests/trainer/parallel/test_scored_attention.py::test_a_layout_trains_as_one_process_does": 4,
    "tests/stores/test_trainer.py::test_a_run_in_a_store_has_the_bytes_of_one_on_a_disk": 2,
    "tests/trainer/inference/test_commands_with_states.py::test_a_server_answers_as_transformers_does": 3,
    "tests/trainer/parallel/test_biencoders.py::test_ten_steps_at_a_layout_are_megatrons": 2,
    "tests/trainer/parallel/test_retro.py::test_six_steps_at_a_layout_are_megatron_cores": 2,
    "tests/trainer/parallel/test_sharding.py::test_ten_steps_are_those_of_one_process": 2,
    "tests/trainer/parallel/test_states_of_megatron.py::test_ten_steps_are_those_of_megatron_core": 8,
    "tests/trainer/parallel/test_transformers.py::test_logits_loss_and_every_gradient_are_those_of_transformers": 2,
    "tests/trainer/parallel/test_mixtures_of_transformers.py::test_logits_loss_and_every_gradient_are_those_of_transformers": 2,
    "tests/trainer/planning/test_planning.py::test_bytes_of_communication_are_those_that_a_step_hands_over": 10,
    "tests/trainer/planning/test_planning.py::test_memory_of_parameters_gradients_and_optimizer_is_that_of_a_run": 3,
}
"""Of expensive grids, which case runs in `make test`: every second, every third and so on. The others are slow."""


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        grid = item.nodeid.partition("[")[0]
        if grid not in GRIDS or item.get_closest_marker("slow"):
            continue
        if seen[grid] % GRIDS[grid]:
            item.add_marker(pytest.mark.slow)
        seen[grid] += 1


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """Its processes start with the first question."""
    with Megatron(tmp_path_factory.mktemp("megatron")) as running:
        yield running
