#!/usr/bin/env python3
"""The cold benchmark's limit: by hand on small cases, against a second search, and its reader of model headers."""
import itertools
import os
import random
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import cold_cells
import cold_limit
import pool
from cold_limit import Box, Work
from gguf_header import Model, Refused

INF = float("inf")
MKMODEL = os.path.join(pool.ROOT, "tests", "bench", "mkmodel")


def work(layers, **more):
    defaults = {"head": 0, "embed_row": 0, "width": 1, "prompt": 1, "compute_s": 0.0}
    return Work(layers=tuple(layers), **{**defaults, **more})


def equal(value, want):
    assert abs(value - want) < 1e-9 * max(1.0, abs(want)), (value, want)


def one_box_reads_everything():
    limit = cold_limit.least(work([100, 200], head=50, embed_row=10, prompt=3), [Box(10, INF)])
    equal(limit.seconds, (100 + 200 + 50 + 3 * 10) / 10)
    assert limit.plan == ((0, 0, 2),), limit.plan


def alike_boxes_share_evenly():
    limit = cold_limit.least(work([10] * 4), [Box(1, INF)] * 4)
    equal(limit.seconds, 10)
    assert [layers for _, _, layers in limit.plan] == [1, 1, 1, 1]


def a_faster_disk_takes_more_layers_wherever_it_stands():
    # 12 layers of 10 bytes at 4, 1 and 1 bytes a second: 8, 2 and 2 layers, 20 s each.
    for rates in set(itertools.permutations((4, 1, 1))):
        limit = cold_limit.least(work([10] * 12), [Box(rate, INF) for rate in rates])
        equal(limit.seconds, 20)
        assert sorted(layers for _, _, layers in limit.plan) == [2, 2, 8], limit.plan


def a_box_too_slow_for_one_layer_is_left_out():
    limit = cold_limit.least(work([10, 10]), [Box(1, INF), Box(0.1, INF)])
    equal(limit.seconds, 20)
    assert limit.plan == ((0, 0, 2),), limit.plan


def a_heavy_head_leaves_the_last_stage_few_layers():
    limit = cold_limit.least(work([10] * 5, head=30), [Box(1, INF)] * 2)
    equal(limit.seconds, 40)
    assert [layers for _, _, layers in limit.plan] == [4, 1], limit.plan


def only_the_rows_of_the_prompt_are_read_of_the_embedding():
    few = cold_limit.least(work([10], embed_row=2, prompt=1), [Box(1, INF)])
    many = cold_limit.least(work([10], embed_row=2, prompt=50), [Box(1, INF)])
    equal(few.seconds, 12)
    equal(many.seconds, 110)


def activations_cross_the_links_between_stages():
    # 100 tokens of 5 floats: 2000 bytes at 10 bytes a second take longer than one box with both layers.
    limit = cold_limit.least(work([50, 50], width=5, prompt=100), [Box(1, 10), Box(1, 10)])
    equal(limit.seconds, 100)
    equal(limit.wire_s, 0)
    # With better links it is worth it, and both ways of a link count once each.
    limit = cold_limit.least(work([50, 50, 50], width=5, prompt=100), [Box(1, 40)] * 3)
    equal(limit.seconds, 50)
    equal(limit.wire_s, 50)


def the_warm_prompt_is_a_limit_too():
    limit = cold_limit.least(work([10, 10], compute_s=15.0), [Box(1, INF)] * 2)
    equal(limit.seconds, 15)
    equal(limit.disk_s, 10)


def one_file_is_read_once_and_leaves_over_one_link():
    # The source reads 40 bytes, whoever computes.  Alone: 40 s.  Its link would need 20 s or more for others.
    boxes = [Box(1, 1), Box(INF, 1)]
    equal(cold_limit.least(work([10] * 4, source=0), boxes).seconds, 40)
    # A slow link and a fast disk: keep it all.
    limit = cold_limit.least(work([10] * 4, source=0), [Box(100, 0.01), Box(100, 0.01)])
    equal(limit.seconds, 0.4)
    assert limit.plan == ((0, 0, 4),), limit.plan
    # The file on the second box: the same, mirrored.
    assert cold_limit.least(work([10] * 4, source=1), [Box(100, 0.01)] * 2).plan == ((1, 0, 4),)


def bytes_in_memory_take_no_disk():
    equal(cold_limit.least(work([10] * 4, compute_s=0.5), [Box(INF, INF)]).seconds, 0.5)


def by_recursion(task, boxes, order, layer, left):
    """A second, slower search: which box takes the next layers, tried one after the other."""
    total = len(task.layers)
    if layer == total:
        yield order
        return
    for box in left:
        for count in range(1, total - layer + 1):
            yield from by_recursion(task, boxes, [*order, (box, layer, count)], layer + count, left - {box})


def seconds_of(task, boxes, plan):
    disk = [0.0] * len(boxes)
    sent, got = [0.0] * len(boxes), [0.0] * len(boxes)
    for number, (box, first, count) in enumerate(plan):
        size = sum(task.layers[first:first + count])
        size += task.prompt * task.embed_row if first == 0 else 0
        size += task.head if first + count == len(task.layers) else 0
        if task.source is None:
            disk[box] += size
        else:
            disk[task.source] += size
            if box != task.source:
                sent[task.source] += size
                got[box] += size
        if number > 0:
            sent[plan[number - 1][0]] += 4 * task.width * task.prompt
            got[box] += 4 * task.width * task.prompt
    times = [size / box.disk for size, box in zip(disk, boxes)]
    times += [size / box.link for sizes in (sent, got) for size, box in zip(sizes, boxes)]
    return max(*times, task.compute_s)


def a_second_search_finds_nothing_better():
    draw = random.Random(7)
    for _ in range(60):
        boxes = [Box(draw.choice((1, 2, 5, 7.5)), draw.choice((1, 10, INF))) for _ in range(draw.randint(1, 3))]
        task = work([draw.randint(1, 30) for _ in range(draw.randint(1, 5))], head=draw.randint(0, 60),
                    embed_row=draw.randint(0, 3), width=draw.randint(1, 4), prompt=draw.randint(1, 3),
                    compute_s=draw.choice((0.0, 3.0)), source=draw.choice((None, 0, len(boxes) - 1)))
        plans = by_recursion(task, boxes, [], 0, frozenset(range(len(boxes))))
        best = min(seconds_of(task, boxes, plan) for plan in plans)
        found = cold_limit.least(task, boxes)
        equal(found.seconds, best)
        equal(seconds_of(task, boxes, found.plan), best)


def made(folder, *flags):
    path = os.path.join(folder, "made.gguf")
    subprocess.run([MKMODEL, "--layers", "3", "--width", "64", "--heads", "4", "--kv-heads", "2",
                    "--ffn", "96", "--vocab", "500", "--out", path, *flags], check=True)
    return path


def a_header_says_what_a_stage_needs():
    with tempfile.TemporaryDirectory() as folder:
        model = Model(made(folder))
        row = 64 // 32 * 18
        layer = row * (64 + 32 + 32 + 64 + 96 + 96) + 64 * 96 // 32 * 18 + 2 * 64 * 4
        assert model.layers == [layer] * 3, (model.layers, layer)
        assert (model.embed_row, model.head, model.width) == (row, 500 * row + 64 * 4, 64)
        assert model.file_size > 3 * layer + 2 * 500 * row
        tied = Model(made(folder, "--tied"))
        assert tied.head == model.head and tied.file_size < model.file_size


def the_same_seed_makes_the_same_model():
    with tempfile.TemporaryDirectory() as folder:
        contents = []
        for seed in ("5", "5", "6"):
            with open(made(folder, "--seed", seed), "rb") as file:
                contents.append(file.read())
            assert os.listdir(folder) == ["made.gguf"], "nothing is left beside the model"
        assert contents[0] == contents[1] != contents[2]


def models_that_cannot_be_written_cost_one_sentence():
    def fails(*flags, **more):
        done = subprocess.run([MKMODEL, *flags], capture_output=True, text=True, timeout=60, check=False, **more)
        assert done.returncode not in (0, 77) and done.stderr.count("\n") == 1, (flags, done)
        return done.stderr
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "made.gguf")
        assert "/nowhere/made.gguf" in fails("--out", "/nowhere/made.gguf")
        assert "--out" in fails()
        assert "Q9_9" in fails("--out", path, "--type", "Q9_9")
        assert "layer count is 0" in fails("--out", path, "--layers", "0")
        assert "width is 100" in fails("--out", path, "--width", "100", "--heads", "10")
        assert "free" in fails("--out", path, "--width", "65536", "--ffn", "65536", "--layers", "512", "--heads", "512")
        assert "is not built" in fails("--out", path, env={**os.environ, "FIRSTLIGHT_BUILD": folder})
        os.mkdir(path)
        assert path in fails("--out", path, "--layers", "1", "--width", "64", "--heads", "4", "--kv-heads", "2", "--ffn",
                             "64", "--vocab", "400")
        assert os.listdir(folder) == ["made.gguf"], "nothing is left beside it"


def a_file_that_is_no_model_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        with open(made(folder), "rb") as file:
            good = file.read()
        path = os.path.join(folder, "bad.gguf")
        for bad in (b"", b"GGUF", b"nonsense" * 4, good[:200], good[:24] + struct.pack("<Q", 1 << 62) + good[32:]):
            with open(path, "wb") as file:
                file.write(bad)
            try:
                Model(path)
            except Refused as why:
                assert path in str(why), why
            else:
                raise AssertionError(f"{bad[:40]} was taken for a model")


def cells_are_those_that_were_agreed_on():
    names = list(cold_cells.CELLS)
    assert names == ["1", "1s", "2", "2e", "3", "3s", "4", "4s", "5", "5n", "6", "6r", "7", "8", "8u", "9"], names
    assert [cell.name for cell in cold_cells.chosen("9,1")] == ["1", "9"]
    assert [cell.name for cell in cold_cells.chosen("8")] == ["8", "8u"]
    for text in ("", "1,", "1 ", "10", "1,x"):
        try:
            cold_cells.chosen(text)
        except KeyError:
            continue
        raise AssertionError(f"'{text}' was taken for cells")


if __name__ == "__main__":
    pool.main([one_box_reads_everything, alike_boxes_share_evenly, a_faster_disk_takes_more_layers_wherever_it_stands,
               a_box_too_slow_for_one_layer_is_left_out, a_heavy_head_leaves_the_last_stage_few_layers,
               only_the_rows_of_the_prompt_are_read_of_the_embedding, activations_cross_the_links_between_stages,
               the_warm_prompt_is_a_limit_too, one_file_is_read_once_and_leaves_over_one_link,
               bytes_in_memory_take_no_disk, a_second_search_finds_nothing_better, a_header_says_what_a_stage_needs,
               the_same_seed_makes_the_same_model,
               models_that_cannot_be_written_cost_one_sentence, a_file_that_is_no_model_is_refused,
               cells_are_those_that_were_agreed_on])
