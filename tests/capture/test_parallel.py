"""Models whose heads are split over processes are refused: a process would report its own heads as all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import floatscope as fs

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MESSAGE = "is split over 2 processes (tensor parallelism): each process sees only its own attention heads"


@pytest.fixture
def two_processes():
    """One of two processes; the other one is not real."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("axis", "placement", "is_refused"),
    [("tp", Shard(0), True), (None, Shard(1), True), ("tp", Replicate(), False), ("fsdp", Shard(0), False)],
)
def test_weights_that_are_split_over_processes_are_refused(two_processes, axis, placement, is_refused):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=None if axis is None else (axis,))
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight.detach(), mesh, [placement]))
    if not is_refused:
        with fs.watch(model):
            return
    with pytest.raises(fs.UserError) as error, fs.watch(model):
        pass
    assert f"'model.layers.1.self_attn.q_proj.weight' {MESSAGE}" in str(error.value)


PROGRAM = """
import sys
import torch.distributed as distributed
import transformers
from transformers.distributed import DistributedConfig
import floatscope as fs

distributed.init_process_group("gloo")
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_size=2))
for part in (model, model.model, model.model.layers[0]):
    try:
        with fs.watch(part):
            pass
    except fs.UserError as error:
        print(f"rank {distributed.get_rank()}: {error}", flush=True)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_tensor_parallel_model_of_transformers_is_refused(tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    source = Path(fs.__file__).parents[1]
    base = {**os.environ, "PYTHONPATH": str(source), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "model")]
    ranks = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=180)[0] for process in ranks]
    for rank, output in enumerate(outputs):
        assert output.count(f"rank {rank}: ") == output.count(MESSAGE) == 3
