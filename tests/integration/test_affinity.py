#!/usr/bin/env python3
"""The CPUs that a node's threads keep to: one each when they are as many, no particular ones when they are not."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool as cluster

CPUS = os.sched_getaffinity(0)


def placed(node):
    """Of each thread that a node started, in this order: its name, the CPUs that it may use."""
    threads = []
    for task in sorted(os.listdir(f"/proc/{node.pid}/task"), key=int):
        with open(f"/proc/{node.pid}/task/{task}/comm", encoding="ascii") as name:
            threads.append((name.read().strip(), os.sched_getaffinity(int(task))))
    return threads


def each_thread_has_its_own_cpu():
    with cluster.Pool(nodes=1, threads=len(CPUS)) as pool:
        node = pool.nodes["box1"]
        cluster.wait_until(lambda: dict(placed(node))["compute"] == {min(CPUS)}, 5, "compute keeps to the first CPU")
        threads = placed(node)
    first, *others = [{cpu} for cpu in sorted(CPUS)]
    wire, *helpers = [cpus for name, cpus in threads if name == "firstlight-node"]
    named = dict(threads)
    assert wire == first and helpers == others and named["compute"] == first, threads
    # The disk is read beside computing, on whatever CPU has time.
    assert named["loader"] == CPUS, threads


def a_load_may_use_any_cpu_until_it_is_done():
    cluster.need_model(cluster.GEMMA3)
    with cluster.Pool(nodes=1, threads=len(CPUS), fetch=True) as pool:
        node, seen = pool.nodes["box1"], []
        asked = cluster.Process([cluster.program("firstlight"), "load", cluster.GEMMA3], pool.path("load.log"),
                                {"FIRSTLIGHT_ADDR": pool.address})
        while asked.alive():
            cpus = dict(placed(node))["compute"]
            if not seen or seen[-1] != cpus:
                seen.append(cpus)
        assert asked.popen.returncode == 0, asked.log()
        first = {min(CPUS)}
        cluster.wait_until(lambda: dict(placed(node))["compute"] == first, 5, "compute keeps to the first CPU again")
    assert seen[0] == first and CPUS in seen, seen


def more_or_fewer_threads_run_anywhere():
    for count in {len(CPUS) - 1, len(CPUS) + 1} - {0}:
        with cluster.Pool(nodes=1, threads=count) as pool:
            threads = placed(pool.nodes["box1"])
        assert len(threads) >= count + 2 and all(cpus == CPUS for _, cpus in threads), threads


def a_node_keeps_to_what_it_was_given():
    only = {max(CPUS)}
    os.sched_setaffinity(0, only)
    try:
        with cluster.Pool(nodes=1, threads=1) as pool:
            threads = placed(pool.nodes["box1"])
    finally:
        os.sched_setaffinity(0, CPUS)
    assert all(cpus == only for _, cpus in threads), threads


if __name__ == "__main__":
    cluster.main([each_thread_has_its_own_cpu, a_load_may_use_any_cpu_until_it_is_done, more_or_fewer_threads_run_anywhere, a_node_keeps_to_what_it_was_given])
