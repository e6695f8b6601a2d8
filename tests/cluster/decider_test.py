"""Promises of the scheduling core on real traffic: what it says is cached is cached, through evictions, preemption, a lost worker and one
that comes; and it serves more of the traffic in time than a worker's queue would. Needs shared/traces beside this clone."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(os.environ.get("MILLRACE_BIN_DIR", ROOT / "build" / "cpu" / "bin"))
TRACES = ROOT.parent / "shared" / "traces"
TRACE = TRACES / "conversation_trace.jsonl.gz"


def judge(*options):
    """The report of the judge; it ends with status 2 when a claim is not exact."""
    command = [shutil.which("pypy3") or sys.executable, "-B", str(TRACES / "sim" / "external.py"), str(TRACE), *map(str, options), "--",
               str(BIN / "millrace-decider")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(f"status {run.returncode}: {run.stderr}")
    return json.loads(run.stdout)


@unittest.skipUnless(TRACE.exists(), "shared/traces is not beside this clone")
class DeciderTest(unittest.TestCase):
    def test_serves_real_traffic_exactly(self):
        report = judge("--n", 4, "--pool", 0.8, "--speed", 1.75, "--limit", 1500)
        self.assertEqual(report["claims"], 1500)
        self.assertGreaterEqual(report["good"], 0.95)

    def test_stays_exact_in_pools_that_are_too_small_while_workers_come_and_go(self):
        report = judge("--n", 4, "--pool", 0.15, "--speed", 2.4, "--limit", 1000, "--leave", "60,1", "--join", "90,1", "--leave", "100,2")
        self.assertGreater(report["claims"], 1000)
        self.assertGreater(report["evicted"], 10000)


if __name__ == "__main__":
    unittest.main()
