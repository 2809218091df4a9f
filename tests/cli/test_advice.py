"""What `doctor` and `plan` advise follows from the machine."""

import json

import pytest

from dilabench.cli.show.advice import advice
from dilabench.machine import Machine
from dilabench.plugins.manager import discover
from dilabench.record import GpuInfo

H200 = GpuInfo(name="H200", compute_capability="9.0")


@pytest.mark.parametrize(
    ("machine", "there", "absent"),
    [
        (Machine(device="cpu", no_cuda="none"), "--dtype float32", "NCCL"),
        (Machine(device="cuda", gpus=(H200,)), "expandable_segments", "NCCL"),
        (Machine(device="cuda", gpus=(H200, H200)), "dilabench run ring --nproc 2", "--dtype float32"),
    ],
)
def test_each_machine_gets_its_own(machine, there, absent):
    told = "\n".join(advice(machine, discover().catalogue, 2**34))
    assert there in told
    assert absent not in told


def test_a_gpu_without_a_library_is_told_how_to_install_it():
    told = list(advice(Machine(device="cuda", gpus=(H200,)), discover().catalogue, None))
    assert any("pip install 'dilabench[flash4]'" in one for one in told)


def test_doctor_gives_it_to_programs_as_well(cli):
    assert json.loads(cli("doctor", "--json").stdout)["advice"]
