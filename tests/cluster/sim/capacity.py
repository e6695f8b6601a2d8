#!/usr/bin/env python3
"""Capacity of millrace-decider on a trace, cell by cell: the highest offered rate at which 95 % of the requests are good,
found as shared/traces/sim/bench.py finds it for its own rules. pypy3 is 5 to 8 times faster than python3.
Usage: capacity.py SIM_FOLDER TRACE DECIDER [--n 4,8,16] [--pool 0.2,0.5,0.8,2] [--speed 2.2,…] [--jobs 2]
With --speed, those speeds are run as they are instead."""
import argparse
import multiprocessing
import sys


def simulate(o, n, pool, speed, share):
    from external import External, Told
    from bench import WORKERS
    from sim import Cluster, Cost, load
    trace = load(o.trace, speed, o.copies)
    decider = External([o.decider])
    cluster = Cluster(trace, decider, n, int(pool * 1e6), Cost(**WORKERS["time45"]), True, lambda meta: Told(meta, decider),
                      allow=(1 - share) * len(trace) if share else float("inf"))
    decider.seqs_all = {s.id: s for s in trace}
    cluster.run()
    decider.child.stdin.close()
    decider.child.wait()
    return dict(cluster.report(), claims=decider.checked)


def cell(job):
    o, n, pool, speed = job
    sys.path.insert(0, o.sim)
    sys.dont_write_bytecode = True
    if speed:
        return n, pool, speed, simulate(o, n, pool, speed, 0)
    low, high, best = 0.05, 0.9, None
    for _ in range(7):
        middle = (low + high) / 2
        report = simulate(o, n, pool, middle * n * o.base, 0.95)
        if report["good"] >= 0.95:
            low, best = middle, report
        else:
            high = middle
    return n, pool, 0, best


def main():
    parser = argparse.ArgumentParser()
    for name in ("sim", "trace", "decider"):
        parser.add_argument(name)
    for name, default in (("--n", "4,8,16"), ("--pool", "0.2,0.5,0.8,2"), ("--speed", "0")):
        parser.add_argument(name, default=default, type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--base", type=float, default=1.0, help="scales the searched speeds")
    o = parser.parse_args()
    for part in ("n", "pool", "speed"):
        default = parser.get_default(part)
        if getattr(o, part) == default:
            setattr(o, part, [float(x) for x in default.split(",")])
    jobs = [(o, int(n), pool, speed) for n in o.n for pool in o.pool for speed in o.speed]
    with multiprocessing.Pool(o.jobs) as processes:
        for n, pool, speed, r in processes.imap(cell, jobs):
            head = f"N={n:<2} pool={pool}M " + (f"speed={speed} " if speed else f"capacity={r['offered']:.2f}/s " if r else "capacity=0 ")
            print(head + " ".join(f"{k}={r[k]:.3f}" for k in ("good", "hit", "p50", "p90", "p99", "stretch", "imbalance", "preempted",
                                                             "claims")) if r else head, flush=True)


if __name__ == "__main__":
    main()
