"""How often `dilabench check` errs, and how often it finds +10 % and +20 %, by its command line on this machine.

Every lane makes a baseline of its own and then checks against it again and again: mostly code that did not change, now
and then with `slowed` (tests/slowed_plugin) repeating a tenth or a fifth of its work. `gather`, beside it in the same
sessions, never changes; every other check takes times relative to it. Verdicts are kept as they come, so that a time
limit leaves those it had time for. From the root of the repository, on 16 quiet cores (8 lanes of 2) for nine minutes,
and on one GPU:

    PYTHONPATH=. python scripts/check_error_rates.py --lanes 8 --checks 400 --limit 540 --output check-cpu.json
    PYTHONPATH=. python scripts/check_error_rates.py --device cuda --checks 60 --limit 540 --output check-cuda.json

It needs nothing but what dilabench itself needs, and `taskset` (util-linux) where there is more than one lane.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

from dilabench.atomic_file import write_text
from dilabench.stats.decisions.decide import binomial_interval
from dilabench.stats.decisions.verdicts import Code

ROOT = Path(__file__).parents[1]
PLANTED, CONTROL = "slowed", "gather"
# A tenth and a fifth of ten sequences are one and two.
PLANTED_SHARES = (0.0, 0.1, 0.2)
# Twice as many checks of identical code as of slower code.
SHARES = "0,0.1,0,0,0.2,0"
SHAPES = {
    "cpu": ("--batch-size", "10", "--seq-length", "512", "--num-heads", "1", "--head-dim", "32"),
    "cuda": ("--batch-size", "10", "--seq-length", "8192", "--num-heads", "16", "--head-dim", "64"),
}
SESSION_BUDGETS = {"cpu": "6s", "cuda": "20s"}
ONE_SEGMENT = {"cpu": "512", "cuda": "8192"}
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: dilabench-slowed\nVersion: 1.0\n"}
PLUGIN["entry_points.txt"] = "[dilabench]\nslowed = dilabench_slowed\n"


class Lane:
    """One baseline and the checks against it, on cores, with a store and a lock of its own."""

    def __init__(self, number: int, folder: Path, options: argparse.Namespace, deadline_s: float) -> None:
        self.number, self.folder, self.options, self.deadline_s = number, folder, options, deadline_s
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // options.lanes
        mine = cores[number * each : (number + 1) * each]
        self.pinned = ["taskset", "-c", ",".join(map(str, mine))] if options.lanes > 1 else []
        paths = [ROOT, ROOT / "tests" / "slowed_plugin", folder.parent / "site"]
        self.variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            # The work is small, and a core is left to what waits for it.
            "OMP_NUM_THREADS": "1",
            "DILABENCH_STORE": str(folder / "store"),
            "DILABENCH_LOCK_DIR": str(folder),
        }
        folder.mkdir()

    def call(self, *arguments: str, share: float = 0.0) -> subprocess.CompletedProcess[str]:
        """Run a command of dilabench; raises TimeoutExpired at the end of the time limit."""
        command = [*self.pinned, sys.executable, "-m", "dilabench", *arguments]
        variables = {**self.variables, "DILABENCH_SLOWED_SHARE": str(share)}
        with subprocess.Popen(
            command, env=variables, cwd=self.folder, text=True, stdout=-1, stderr=-1, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=max(0.1, self.deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The workers are in its session.
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def checks(self) -> Iterator[dict[str, Any]]:
        """The baseline, then a check after another until the time limit."""
        device = self.options.device
        shape = (*SHAPES[device], "--set", f"segment_lengths={ONE_SEGMENT[device]}", "--set", "dilation_rates=1")
        names = (
            "-i",
            PLANTED,
            "-i",
            CONTROL,
            "--device",
            device,
            "--budget",
            self.options.session_budget or SESSION_BUDGETS[device],
        )
        for session in range(self.options.baseline):
            done = self.call("run", "implementations", *shape, *names, "-o", f"base{session}")
            if done.returncode:
                raise SystemExit(f"the baseline ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        self.call("baseline", "save", "main", *map(str, self.folder.glob("base*/*")))
        shares = [float(share) for share in self.options.shares.split(",")]
        for share, relative in cycle(product(shares, (True,) if self.options.relative else (False, True))):
            began_s = time.monotonic()
            how = ("--budget", self.options.budget, *(("--relative-to", CONTROL) if relative else ()))
            done = self.call("check", "--against", "main", "--json", "--no-store", *how, share=share)
            found = {"lane": self.number, "share": share, "relative": relative, "exit_code": done.returncode}
            found["stderr"] = done.stderr
            found["seconds"] = time.monotonic() - began_s
            cells = json.loads(done.stdout)["cells"] if done.stdout else []
            found["verdicts"] = {one["baseline"]["implementation"]: one["verdict"] for one in cells}
            yield found


def rates(checks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each verdict fell, with the exact 95 % interval (Clopper and Pearson), by what was planted."""
    found = []
    for relative, share in product((False, True), PLANTED_SHARES):
        title = f"{PLANTED}, +{share:.0%}" if share else "identical"
        title += f", relative to {CONTROL}" if relative else ""
        verdicts = [
            verdict
            for check in checks
            for name, verdict in check["verdicts"].items()
            if ((check["share"] if name == PLANTED else 0.0), check["relative"]) == (share, relative)
        ]
        counts = {code: sum(one["code"] == code for one in verdicts) for code in Code}
        entry: dict[str, Any] = {"case": title, "verdicts": len(verdicts)}
        for code, hits in counts.items() if verdicts else ():
            interval = binomial_interval(hits, len(verdicts))
            entry[code] = {"hits": hits, "rate": hits / len(verdicts), "interval": [interval.low, interval.high]}
        found.append(entry)
    return found


def main() -> None:
    """Run the lanes, print and keep the rates."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--checks", type=int, default=200, help="how many, over all lanes (default 200)")
    arguments.add_argument("--lanes", type=int, default=1, help="checks at a time, each on its share of the cores")
    arguments.add_argument("--device", choices=SHAPES, default="cpu")
    arguments.add_argument("--baseline", type=int, default=8, help="sessions of each lane's baseline (default 8)")
    arguments.add_argument("--budget", default="60s", help="of a check (default 60s)")
    arguments.add_argument("--session-budget", help="of one session (default 6s, on a GPU 20s)")
    arguments.add_argument("--shares", default=SHARES, help=f"what is planted, in turn (default {SHARES})")
    arguments.add_argument("--relative", action="store_true", help=f"always take times relative to {CONTROL}")
    arguments.add_argument("--limit", type=float, default=540, help="seconds after which all ends (default 540)")
    arguments.add_argument("--output", type=Path, default=Path("check-error-rates.json"))
    options = arguments.parse_args()
    began_s, lock, checks, problems = time.monotonic(), threading.Lock(), list[dict[str, Any]](), list[str]()

    def keep() -> list[dict[str, Any]]:
        found = rates(checks)
        about = {"options": {**vars(options), "output": str(options.output)}, "seconds": time.monotonic() - began_s}
        write_text(options.output, json.dumps({**about, "rates": found, "problems": problems, "checks": checks}))
        return found

    def work(lane: Lane) -> None:
        try:
            for found in lane.checks():
                with lock:
                    if len(checks) >= options.checks:
                        return
                    checks.append(found)
                    keep()
        except subprocess.TimeoutExpired:
            return
        except (SystemExit, ValueError) as error:
            problems.append(f"lane {lane.number}: {error}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        info = folder / "site" / "dilabench_slowed-1.0.dist-info"
        info.mkdir(parents=True)
        for file, text in PLUGIN.items():
            (info / file).write_text(text)
        lanes = [Lane(one, folder / f"lane{one}", options, began_s + options.limit) for one in range(options.lanes)]
        threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in keep():
        print(f"{one['case']}: {one['verdicts']} verdicts")
        for code in Code if one["verdicts"] else ():
            hits, rate, (low, high) = one[code].values()
            print(f"  {code:12} {hits:4}  {rate:6.1%}  ({low:.1%} to {high:.1%})")
    print("\n".join([*problems, f"kept in {options.output}"]))


if __name__ == "__main__":
    main()
