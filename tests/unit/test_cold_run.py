#!/usr/bin/env python3
"""What the cold benchmark takes for a result: classes, verified states, chains that add up, answers that agree."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import cold_boxes
import cold_cells
import cold_limit
import cold_run
import pool
from cold_boxes import Refused

CELL = cold_cells.CELLS["1"]
WARM = cold_cells.CELLS["8"]
UNLOADED = cold_cells.CELLS["8u"]


class Cluster:
    """Gives a timeline when it has one."""

    def __init__(self, timeline=None):
        self.kept = timeline

    def timeline(self, number):  # pylint: disable=unused-argument
        return self.kept

    def waterfall(self, number):
        return f"waterfall {number}"


def chain(*segments, ttft=None, shares=(0.0,)):
    """Segments are (phase, node, milliseconds)."""
    at, exposed = 0.0, []
    for phase, node, ms in segments:
        exposed.append({"phase": phase, "node": node, "start_ms": at, "ms": ms, "bytes": 0})
        at += ms
    nodes = [{"node": f"box{number + 1}", "page_cache_before": share} for number, share in enumerate(shares)]
    return {"ttft_ms": at if ttft is None else ttft, "exposed": exposed, "nodes": nodes, "predicted_ms": None}


def run(timeline=None, outside_ms=None, **answer):
    found = {"class": "cold", "ttft_ms": 100.0, "prompt_tokens": CELL.prompt, "cached_tokens": 0, "tokens": [1, 2],
             "timeline_id": 7 if timeline else 0, **answer}
    return cold_run.Run(found, Cluster(timeline), outside_ms)


def refused(action, *words):
    try:
        action()
    except Refused as why:
        assert all(word in str(why) for word in words), why
    else:
        raise AssertionError("was taken for a result")


def a_class_that_is_unknown_or_unwanted_is_refused():
    run().check(CELL, True)
    run(**{"class": "warm"}).check(WARM, True)
    for found in ("cold", "partial", "warm"):
        run(**{"class": found}).check(UNLOADED, True)
    for found in ("unknown", "", None, "hot"):
        refused(lambda found=found: run(**{"class": found}).check(UNLOADED, True), "class", "unknown")
    for found in ("partial", "warm"):
        refused(lambda found=found: run(**{"class": found}).check(CELL, True), found, "cold")
    refused(lambda: run().check(WARM, True), "cold", "warm")


def another_prompt_than_the_cells_is_refused():
    refused(lambda: run(prompt_tokens=17).check(CELL, True), "17", "16")
    run(prompt_tokens=17).check(CELL, None)  # a model of one's own
    run(cached_tokens=1).check(CELL, True)  # the beginning-of-text token
    refused(lambda: run(cached_tokens=15).check(CELL, True), "15")


def a_chain_that_does_not_add_up_is_refused():
    run(chain(("read", "box1", 60.0), ("compute", "box2", 40.0))).check(CELL, True)
    refused(lambda: run(chain(("read", "box1", 60.0), ttft=100.0)).check(CELL, True), "60.000", "100.000")


def a_shard_found_in_the_page_cache_is_refused():
    run(chain(("read", "box1", 1.0), shares=(0.0, 0.005, None))).check(CELL, True)
    refused(lambda: run(chain(("read", "box1", 1.0), shares=(0.0, 0.4))).check(CELL, True), "box2", "40%")
    run(chain(("read", "box1", 1.0), shares=(1.0,)), **{"class": "warm"}).check(WARM, True)


def exposed_time_is_summed_by_phase():
    one = run(chain(("read", "box1", 10.0), ("compute", "box1", 5.0), ("read", "box2", 20.0)))
    assert one.exposed() == {"read": 30.0, "compute": 5.0}, one.exposed()
    assert one.waterfall == "waterfall 7"
    assert run().exposed() == {} and run().timeline is None and run().waterfall is None
    launched = run(chain(("read", "box1", 100.0)), outside_ms=900.0)
    assert launched.exposed() == {"read": 100.0, "launch": 800.0}, launched.exposed()
    assert launched.ttft_ms == 900.0


class Boxes:
    names = ["box1"]


class ScriptedBench(cold_run.Bench):
    """Gives prepared runs."""

    def __init__(self, *prepared):
        super().__init__(Boxes(), len(prepared), say=lambda text: None)
        self.prepared = prepared

    def cold(self, cell):
        return list(self.prepared), 5.0

    unloaded = cold


def classes_are_never_put_together():
    refused(lambda: ScriptedBench(run(), run(**{"class": "partial"})).run(UNLOADED), "cold", "partial", "never")


def answers_to_one_prompt_must_agree():
    bench = ScriptedBench(run(tokens=[1, 2, 3]), run(tokens=[1, 2, 3]), run(tokens=[1]))
    assert bench.run(CELL)[1] == 5.0
    bench.prepared = (run(tokens=[1, 2, 4]),)
    refused(lambda: bench.run(cold_cells.CELLS["2e"]), "[1, 2, 4]", "[1, 2, 3]")
    bench.run(UNLOADED)  # asks something else
    refused(lambda: ScriptedBench(run(tokens=[1]), run(tokens=[2])).run(CELL), "[2]", "[1]")


def spreads_keep_every_run():
    assert cold_run.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]}
    assert cold_run.spread([4.0, 1.0])["median"] == 2.5


class Tiny:
    layers, head, embed_row, width = [100, 100], 50, 0, 1


def limits_follow_the_state():
    rates = {"disk": [10.0, 10.0], "link": [1e9, 5.0], "cached": 1000.0}

    def seconds(state, warm_ms=1.0):
        cell = cold_cells.Cell("x", "x", cold_cells.RANDOM, (None, None), state=state)
        return cold_run.limit_of(cell, Tiny, rates, warm_ms)

    assert abs(seconds("cold").seconds - 15) < 1e-6  # one layer and the head
    assert abs(seconds("cold", 20000.0).seconds - 20) < 1e-6
    assert abs(seconds("fetch").seconds - 25) < 1e-6  # all of it from one disk
    assert abs(seconds("refetch").seconds - 15) < 1e-6 and abs(seconds("mpi").seconds - 15) < 1e-6
    assert abs(seconds("warm").seconds - 0.001) < 1e-6
    assert 0.1 < seconds("unloaded").seconds < 0.26
    assert isinstance(seconds("cold"), cold_limit.Limit)


def a_probe_that_fails_is_a_refusal():
    with cold_boxes.PlainBoxes(1) as boxes:
        process = boxes.probe("box1", "disk", "/nowhere", "0.1")
        refused(lambda: cold_boxes.probe_result(process, "the disk of box1"), "the disk of box1", "/nowhere")


if __name__ == "__main__":
    pool.main([a_class_that_is_unknown_or_unwanted_is_refused, another_prompt_than_the_cells_is_refused,
               a_chain_that_does_not_add_up_is_refused, a_shard_found_in_the_page_cache_is_refused,
               exposed_time_is_summed_by_phase, classes_are_never_put_together, answers_to_one_prompt_must_agree,
               spreads_keep_every_run, limits_follow_the_state, a_probe_that_fails_is_a_refusal])
