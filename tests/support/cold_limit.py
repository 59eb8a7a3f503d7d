"""How early a first token can come: a search over every plan there is.

Knows nothing of the planner.  A plan is a choice of boxes, their order, and a contiguous cut of
the layers over them; the first stage also reads the prompt's embedding rows, the last one the head.
No plan can be faster than the slowest of

    disk      bytes a box must read / what its disk was measured to deliver
    wire      bytes that enter or leave a box / what its link was measured to carry
    compute   the whole prompt through the warm model, as measured

and the limit is the least of that over all plans.  When only one box has the file, it reads what
all of them need, and sends the others theirs.
"""
import itertools
from dataclasses import dataclass

FLOAT_SIZE = 4


@dataclass(frozen=True)
class Box:
    disk: float  # bytes a second; inf: the bytes are in memory
    link: float  # bytes a second, each way


@dataclass(frozen=True)
class Work:
    """What the plans cut."""

    layers: tuple  # bytes of each
    head: int
    embed_row: int
    width: int
    prompt: int  # tokens
    compute_s: float
    source: int | None = None  # the only box that has the file; None: every one has it


@dataclass(frozen=True)
class Limit:
    seconds: float
    disk_s: float
    wire_s: float
    compute_s: float
    plan: tuple  # (box, first layer, layers), in pipeline order


def cuts(layers, stages):
    """All ways to cut that many layers into that many stages of at least one: tuples of bounds."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def plan_times(work, boxes, order, bounds, sums):
    """(disk seconds, wire seconds) of one plan."""
    stages = len(order)
    activations = work.prompt * work.width * FLOAT_SIZE
    disk = wire = sent = read = 0
    for stage, box in enumerate(order):
        size = sums[bounds[stage + 1]] - sums[bounds[stage]]
        if stage == 0:
            size += work.prompt * work.embed_row
        if stage == stages - 1:
            size += work.head
        arrives = activations if stage > 0 else 0
        leaves = activations if stage < stages - 1 else 0
        if work.source is None:
            disk = max(disk, size / boxes[box].disk)
        elif box == work.source:
            read += size
            sent += leaves
            leaves = 0
        else:
            read += size
            sent += size
            arrives += size
        wire = max(wire, arrives / boxes[box].link, leaves / boxes[box].link)
    if work.source is not None:
        disk = read / boxes[work.source].disk
        wire = max(wire, sent / boxes[work.source].link)
    return disk, wire


def orders(boxes, count, source):
    """Every choice and order of boxes; of alike ones (same rates, none the source) only the first."""
    seen = set()
    for order in itertools.permutations(range(len(boxes)), count):
        key = tuple((boxes[box], box == source) for box in order)
        if key not in seen:
            seen.add(key)
            yield order


def least(work, boxes):
    """The limit of this work on these boxes."""
    if not boxes or not work.layers:
        raise ValueError("a limit needs at least one box and one layer")
    sums = [0, *itertools.accumulate(work.layers)]
    best = None
    for count in range(1, min(len(boxes), len(work.layers)) + 1):
        for order in orders(boxes, count, work.source):
            for bounds in cuts(len(work.layers), count):
                disk, wire = plan_times(work, boxes, order, bounds, sums)
                key = (max(disk, wire, work.compute_s), disk + wire)
                if best is None or key < best[0]:
                    best = key, disk, wire, order, bounds
    (seconds, _), disk, wire, order, bounds = best
    stages = tuple((box, bounds[stage], bounds[stage + 1] - bounds[stage]) for stage, box in enumerate(order))
    return Limit(seconds, disk, wire, work.compute_s, stages)
