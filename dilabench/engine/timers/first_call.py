"""The wait at the first use: import, build and first call in a new process."""

import json
import subprocess
import sys
from typing import Any

from dilabench.atomic_file import COMPILED_VARIABLE
from dilabench.engine.temporary_folder import temporary_folder
from dilabench.engine.timers import Call, Samples
from dilabench.machine import child_environment, python_command
from dilabench.metadata import FIRST_CALL
from dilabench.record import Note, Verification

STAGES = ("import", "build", "first_call")
TIMEOUT_S = 600.0


class FirstCall:
    """A sample is a new interpreter with empty compiler caches. Loading torch itself and making inputs do not count."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._stages: dict[str, int] = {}
        self._verifications: list[Verification] = []

    def take(self, count: int) -> Samples:
        """Import, build (with compilation and autotuning) and first call together, per fresh process, which then checks
        the result of its first call.
        """
        self._verifications.clear()
        times_ns = tuple(self._sample() for _ in range(count))
        failed = (checked for checked in self._verifications if not checked.passed)
        return Samples(times_ns, verification=next(failed, self._verifications[-1]))

    def notes(self) -> tuple[Note, ...]:
        """The parts of the last sample."""
        parts = ", ".join(f"{stage} {self._stages.get(stage, 0) / 1e6:.1f} ms" for stage in STAGES)
        return (FIRST_CALL.note(parts),) if self._stages else ()

    def _sample(self) -> int:
        with temporary_folder("first-call") as folder:
            caches = {
                "TRITON_CACHE_DIR": f"{folder}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                COMPILED_VARIABLE: f"{folder}/cpu",
            }
            finished = subprocess.run(
                python_command("-m", "dilabench.engine.timers.first_call", self._call.device.type),
                input=self._call.spec.model_dump_json(),
                capture_output=True,
                text=True,
                env=child_environment(**caches),
                timeout=TIMEOUT_S,
                check=False,
            )
        if finished.returncode:
            raise RuntimeError(f"the first call failed in a fresh process: {finished.stderr.strip()[-500:]}")
        told = json.loads(finished.stdout.splitlines()[-1])
        self._stages = told["setup_ns"]
        self._verifications.append(Verification.model_validate(told["verification"]))
        return max(1, sum(self._stages[stage] for stage in STAGES))


def main(device_kind: str, spec_json: str) -> dict[str, Any]:
    """Prepare one case in this process: its set-up times in ns, and the checks of its first call."""
    import torch

    from dilabench.engine.call.inputs import InputStore
    from dilabench.engine.call.prepared_call import PreparedCall
    from dilabench.engine.call.specs import CaseSpec
    from dilabench.engine.device.device import device_of
    from dilabench.engine.verify.timed_outputs import verify_first_calls

    device = torch.device(device_kind)
    # The first use of a device sets it up.
    torch.zeros(1, device=device)
    device_of(device).synchronize()
    spec = CaseSpec.model_validate_json(spec_json)
    call = PreparedCall(spec, device, InputStore(device), keeps_first=True)
    return {"setup_ns": call.setup_ns, "verification": verify_first_calls(call).model_dump(mode="json")}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.stdin.read())) + "\n")
