"""The layer and the models on shards: one process's outputs, losses and gradients of all weights."""

from pathlib import Path

import pytest

from tests.distributed import checks
from tests.distributed.processes import Processes


@pytest.mark.parametrize("name", checks.LAYERS)
def test_a_layer_gives_the_numbers_of_one_process(processes: Processes, name: str) -> None:
    processes.run(checks.layers, name)


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
def test_a_language_model_has_the_loss_and_gradients_of_one_process(
    processes: Processes, packed: bool
) -> None:
    processes.run(checks.language_model, packed)


def test_a_transformers_model_has_the_loss_of_one_process_and_decodes_after_it(processes: Processes) -> None:
    processes.run(checks.hugging_face)


@pytest.mark.parametrize("way", ["DDP", "FSDP", "FSDP in bfloat16"])
def test_data_parallel_gradients_are_those_of_one_process_with_states_in_the_arguments(
    processes: Processes, way: str
) -> None:
    processes.run(checks.data_parallel, way)


def test_shards_of_sequences_and_of_weights_and_checkpointed_activations_go_together(
    processes: Processes,
) -> None:
    processes.run(checks.sharded_sequence_in_shared_weights)


def test_a_mesh_of_two_dimensions_gives_its_cp(processes: Processes) -> None:
    processes.run(checks.mesh_of_two_dimensions)


def test_a_checkpoint_is_read_by_more_and_by_fewer_processes(processes: Processes, tmp_path: Path) -> None:
    processes.run(checks.reshards, str(tmp_path))
