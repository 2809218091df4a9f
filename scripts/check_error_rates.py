"""How often `dilabench check` errs, and how often it finds +25 % and +50 %: sessions of this machine, dealt at random.

`measure` runs sessions of code that does not change, and of `slowed` (tests/slowed_plugin) repeating a quarter or a
half of its work, one after the other in fresh processes; `gather`, in the same rounds, never changes. `--busy 1` keeps
one core busy meanwhile. `deal` draws baselines and new sessions from these records and decides by the rules of `check`,
with `--most` new sessions instead of a budget. From the root of the repository, on an idle machine:

    PYTHONPATH=. python scripts/check_error_rates.py measure idle --sessions 40 --limit 540
    PYTHONPATH=. python scripts/check_error_rates.py measure busy --sessions 40 --limit 540 --busy 1
    PYTHONPATH=. python scripts/check_error_rates.py deal idle busy --output check.json

`measure` adds to a folder that has sessions, so it can be called several times. Deals share sessions, so their counts
are not independent.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from dilabench.atomic_file import write_text
from dilabench.comparison.across import compare_across
from dilabench.comparison.comparison import Comparison, is_measured
from dilabench.comparison.gate import until_decided
from dilabench.record import RunRecord
from dilabench.stats.decisions.decide import Policy, binomial_interval
from dilabench.stats.decisions.history import LOOK_SESSIONS
from dilabench.stats.decisions.verdicts import Code
from dilabench.store.run_files import read_record

ROOT = Path(__file__).parents[1]
PLANTED, CONTROL = "slowed", "gather"
SHARES = (0.0, 0.25, 0.5)
# Most checks are of identical code, so most sessions are.
ORDER = (0.0, 0.0, 0.25, 0.0, 0.0, 0.5)
SHAPES = {
    # Quarters of eight sequences are two. Calls of some milliseconds: sessions of shorter ones spread by 5 %.
    "cpu": ("--batch-size", "8", "--seq-length", "1024", "--num-heads", "2", "--head-dim", "32"),
    "cuda": ("--batch-size", "8", "--seq-length", "8192", "--num-heads", "16", "--head-dim", "64"),
}
ONE_SEGMENT = {"cpu": "1024", "cuda": "8192"}
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: dilabench-slowed\nVersion: 1.0\n"}
PLUGIN["entry_points.txt"] = "[dilabench]\nslowed = dilabench_slowed\n"


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Add sessions to `folder/<share>/`, by turns as in `ORDER`, until there are enough or time is up."""
    info = folder / "site" / "dilabench_slowed-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for name, text in PLUGIN.items():
        (info / name).write_text(text)
    paths = [ROOT, ROOT / "tests" / "slowed_plugin", folder / "site", os.environ.get("PYTHONPATH", "")]
    device = options.device
    command = [sys.executable, "-m", "dilabench", "run", "implementations", *SHAPES[device], "-i", PLANTED]
    command += ["-i", CONTROL, "--device", device, "--budget", options.session_budget]
    command += ["--set", f"segment_lengths={ONE_SEGMENT[device]}", "--set", "dilation_rates=1"]
    deadline_s = time.monotonic() + options.limit
    busy = [multiprocessing.Process(target=_keep_busy, daemon=True) for _ in range(options.busy)]
    for process in busy:
        process.start()
    present = sum(len(list((folder / str(share)).glob("*/run.json"))) for share in SHARES)
    for share in islice(cycle(ORDER), present, options.sessions):
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "DILABENCH_SLOWED_SHARE": str(share),
            "DILABENCH_STORE": str(folder / "store"),
        }
        if time.monotonic() > deadline_s:
            break
        done = subprocess.run([*command, "-o", folder / str(share)], env=variables, check=False, capture_output=True)
        if done.returncode:
            # The records that lack a row are not dealt.
            print(f"a session of +{share:.0%} ended with exit code {done.returncode}: {done.stderr.decode()[-300:]}")
    for process in busy:
        process.terminate()


def _keep_busy() -> None:
    while True:
        pass


def checks(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The verdicts of `--deals` checks of each share."""
    pools = {share: _records(folder / str(share)) for share in SHARES}
    for share in SHARES:
        random = Random(f"{folder} {share}")
        for _ in range(options.deals if share == 0 else options.planted_deals):
            unchanged = random.sample(pools[0.0], len(pools[0.0]))
            baseline, rest = unchanged[: options.baseline], unchanged[options.baseline :]
            new = rest if share == 0 else random.sample(pools[share], len(pools[share]))
            found = check(baseline, new, options.most)
            verdicts = {pair.candidate.implementation: pair.verdict for pair in found.pairs}
            yield {
                "machine": folder.name,
                "share": share,
                "verdicts": {
                    name: {"code": verdict.code, "within": verdict.numbers.unchanged_within}
                    for name, verdict in verdicts.items()
                },
            }


def _records(folder: Path) -> list[RunRecord]:
    records = [read_record(path) for path in sorted(folder.glob("*/run.json"))]
    return [record for record in records if record.rows and all(map(is_measured, record.rows))]


def check(baseline: Sequence[RunRecord], new: Sequence[RunRecord], most: int) -> Comparison:
    """Decide as `check` does, with the first `most` of these sessions in place of measurements; others confirm."""
    sessions = iter(new)

    def measured(_cases: Collection[str], count: int) -> list[RunRecord]:
        return list(islice(sessions, count))

    def judge(records: Sequence[RunRecord], cases: Collection[str], policy: Policy) -> Comparison:
        return compare_across(baseline, records, policy=policy, select=lambda case: case.case_id in cases)

    def further(_cases: Collection[str], count: int) -> int:
        return min(count or LOOK_SESSIONS[0], min(most, len(new) - LOOK_SESSIONS[0]) - count)

    def again(_cases: Collection[str], count: int) -> int:
        return max(LOOK_SESSIONS[0], count)

    cases = {row.case.case_id for row in baseline[0].rows}
    return until_decided(cases, measured, judge, further, again, Policy.for_device(baseline[0].device))


def rates(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each verdict fell, with the exact 95 % interval (Clopper and Pearson), by machine and planted share.

    A check of identical code counts once, by its gravest verdict.
    """
    entries = []
    for machine in dict.fromkeys(one["machine"] for one in found):
        for share in SHARES:
            dealt = [one["verdicts"] for one in found if (one["machine"], one["share"]) == (machine, share)]
            codes = [_gravest(verdicts) if share == 0 else verdicts[PLANTED]["code"] for verdicts in dealt]
            entry: dict[str, Any] = {"machine": machine, "case": f"+{share:.0%}" if share else "identical"}
            entry["checks"] = len(codes)
            for code in Code if codes else ():
                hits = codes.count(code)
                interval = binomial_interval(hits, len(codes))
                entry[code] = {"hits": hits, "rate": hits / len(codes), "interval": [interval.low, interval.high]}
            entries.append(entry)
    return entries


def _gravest(verdicts: dict[str, dict[str, Any]]) -> str:
    codes = {verdict["code"] for verdict in verdicts.values()}
    return next(code for code in (Code.SLOWER, Code.FASTER, Code.UNDECIDED, Code.SAME) if code in codes)


def main() -> None:
    """Measure sessions, or deal them, print and keep the rates."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="command", required=True)
    parser = commands.add_parser("measure")
    parser.add_argument("folder", type=Path, help="its name stands for the machine's state")
    parser.add_argument("--sessions", type=int, default=40, help="in all (default 40)")
    parser.add_argument("--busy", type=int, default=0, help="cores to keep busy (default 0)")
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--session-budget", default="12s", help="of one session (default 12s)")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which it ends (default 540)")
    parser = commands.add_parser("deal")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--deals", type=int, default=200, help="of identical code (default 200)")
    parser.add_argument("--planted-deals", type=int, default=20, help="of each planted share (default 20)")
    parser.add_argument("--baseline", type=int, default=1, help="stored sessions (default 1)")
    parser.add_argument("--most", type=int, default=12, help="new sessions that a check may take (default 12)")
    parser.add_argument("--output", type=Path, default=Path("check-error-rates.json"))
    options = arguments.parse_args()
    if options.command == "measure":
        measure(options.folder.absolute(), options)
        return
    found = [one for folder in options.folders for one in checks(folder, options)]
    entries = rates(found)
    given = {**vars(options), "folders": [folder.name for folder in options.folders], "output": str(options.output)}
    write_text(options.output, json.dumps({"options": given, "rates": entries, "checks": found}))
    for entry in entries:
        print(f"{entry['machine']}, {entry['case']}: {entry['checks']} checks")
        for code in Code if entry["checks"] else ():
            hits, rate, (low, high) = entry[code].values()
            print(f"  {code:10} {hits:4}  {rate:6.1%}  ({low:.1%} to {high:.1%})")
    print(f"kept in {options.output}")


if __name__ == "__main__":
    main()
