"""Does a preset name a workload, or a set of presets that do?"""

from dilabench.conformance.scorecard import Findings
from dilabench.errors import counted
from dilabench.machine import Machine
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import WorkloadPreset
from dilabench.request import preset_names, workload_request
from dilabench.workload.work import attended_pairs


def check_workload(preset: WorkloadPreset, catalogue: Catalogue, machine: Machine, findings: Findings) -> None:
    """Each of its workloads resolves, has work to do, and is computed by something that is registered."""
    for name in preset_names(catalogue, [preset.name]):
        with findings.tried(name):
            workload = workload_request(catalogue, name, {}).resolve(machine.auto_dtype, machine.auto_tokens)
            device = machine.device
            able = [one for one in catalogue.implementations if not catalogue.unsupported(one, workload, device)]
            problem = None if able else "nothing that is registered computes it here"
            if not attended_pairs(workload):
                problem = "no query sees any key"
            findings.hold(name, problem, f"{workload.label()}, computed by {counted(len(able), 'implementation')}")
