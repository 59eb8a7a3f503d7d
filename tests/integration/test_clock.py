#!/usr/bin/env python3
"""The coordinator's view of its nodes' clocks, over real links: here the truth is known."""
import os
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

AHEAD_S = 100000


def clocks(pool):
    """name: (offset, error) in microseconds; None for a clock that is not known."""
    nodes = pool.status().get("nodes", [])
    return {node["name"]: (node["clock_offset_us"], node["clock_error_us"])
            for node in nodes if node["clock_offset_us"] is not None}


def wait_for_clocks(pool, count):
    return cluster.wait_until(lambda: len(clocks(pool)) == count and clocks(pool), 10, f"{count} clocks known")


def check(pool, truth_us):
    """Every known clock is inside its error; the errors."""
    known = clocks(pool)
    for name, (offset, error) in known.items():
        assert error > 0, known
        assert abs(offset - truth_us.get(name, 0)) <= error, f"{name} is off: {known}, truth {truth_us}\n{pool.logs()}"
    return {name: error for name, (_, error) in known.items()}


def one_machine_has_one_clock():
    with cluster.Pool(nodes=2) as pool:
        wait_for_clocks(pool, 2)
        least = {}
        for _ in range(20):
            for name, error in check(pool, {}).items():
                least[name] = min(error, least.get(name, error))
            time.sleep(0.1)
        assert sorted(least) == ["box1", "box2"], least
        assert max(least.values()) < 5000, f"on loopback half a round trip is less than {least} us"
        print(f"  errors in us: {least}")
        assert all(node["slept_ms"] == 0 for node in pool.status()["nodes"])
        text = pool.run("status").out
        assert "clock" in text and "+-" in text, text


def a_node_that_does_not_answer_is_known_less_and_less():
    with cluster.Pool(nodes=1) as pool:
        wait_for_clocks(pool, 1)
        time.sleep(1)
        before = check(pool, {})["box1"]
        pool.nodes["box1"].popen.send_signal(signal.SIGSTOP)
        time.sleep(3)
        after = check(pool, {})["box1"]
        pool.nodes["box1"].popen.send_signal(signal.SIGCONT)
        assert after > before + 1000, f"3 s without an answer: error {before} us, then {after} us"
        cluster.wait_until(lambda: check(pool, {}).get("box1", after) < after / 2, 10, "the clock is known again")
        assert pool.status()["nodes"][0]["slept_ms"] == 0, "a process that stood still is no machine that slept"


def a_clock_far_ahead_is_found():
    if shutil.which("unshare") is None:
        raise cluster.Skip("unshare is not installed")
    wrap = ["unshare", "--time", "--fork", "--kill-child=SIGTERM", "--monotonic", str(AHEAD_S), "--boottime",
            str(AHEAD_S)]
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode != 0:
        raise cluster.Skip("no time namespaces here, or not root")
    with cluster.Pool(nodes=1) as pool:
        ahead = pool.start("ahead", [*wrap, *pool.node_line("ahead"), "--join", pool.join])
        try:
            pool.wait_for(2)
            wait_for_clocks(pool, 2)
            for _ in range(10):
                errors = check(pool, {"ahead": AHEAD_S * 1e6})
                time.sleep(0.1)
            assert errors["ahead"] < 10000, errors
        finally:
            ahead.kill()  # the node gets SIGTERM


if __name__ == "__main__":
    cluster.main([one_machine_has_one_clock, a_node_that_does_not_answer_is_known_less_and_less,
                  a_clock_far_ahead_is_found])
