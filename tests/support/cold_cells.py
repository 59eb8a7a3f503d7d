"""The cells of the cold benchmark: which model, on which boxes, asked what, in which state."""
import os
import subprocess
from dataclasses import dataclass

import pool

MB = 1_000_000
LINK = 125 * MB  # 1 Gbit/s
LONG = "the tide comes in and the light goes round and the tide goes out again; "


@dataclass(frozen=True)
class Subject:
    """A model and the texts that make prompts of a known number of tokens on it."""

    name: str
    prompts: dict  # tokens -> text
    how: str  # to get it


RANDOM = Subject("random-1.1b-q4_0", {16: "first light 15.", 512: (LONG * 11)[:750]}, "tests/bench/mkmodel writes it")
SMOLLM2 = Subject(
    pool.SMOLLM2,
    {16: "The old lighthouse keeper climbed the stairs every evening to light the lamp for passing ships"},
    "'cluster/models smollm2' fetches it")
GEMMA3 = Subject(
    pool.GEMMA3, {16: "The old lighthouse keeper climbed the stairs every evening to light the lamp for ships"},
    "'cluster/models gemma3' fetches it")

# How a cell's request finds things; the sentences are part of the result.
STATES = {
    "cold": "coordinator and nodes up and idle, the model not loaded, its files out of the page cache; t0 = the "
            "request reaches the coordinator",
    "fetch": "coordinator and nodes up and idle, only the coordinator's box has the file, shard caches empty, the "
             "file out of the page cache; t0 = the request reaches the coordinator",
    "refetch": "coordinator and nodes started anew and idle, shard caches filled by an earlier start, file and "
               "caches out of the page cache; t0 = the request reaches the coordinator",
    "mpi": "nothing runs, the model's files out of the page cache; t0 = exec of mpirun, the end = the client has "
           "the first token; the client asks as soon as all nodes have joined",
    "warm": "the model loaded, another prompt of the same length asked before; t0 = the request reaches the "
            "coordinator",
    "unloaded": "the model was loaded and unloaded again, its files in the page cache; t0 = the request reaches "
                "the coordinator",
}


@dataclass(frozen=True)
class Cell:
    name: str
    title: str
    subject: Subject
    disks: tuple  # bytes a second of each box; None: not throttled
    prompt: int = 16
    state: str = "cold"
    flags: tuple = ()  # of the coordinator

    @property
    def wanted_class(self):
        """What the answers must say they were; None: whatever they found."""
        return {"warm": "warm", "unloaded": None}.get(self.state, "cold")


FOUR = (100 * MB,) * 4
MIXED = (200 * MB, 100 * MB, 50 * MB, 50 * MB)
SLOW = (25 * MB,) * 4
CELLS = {cell.name: cell for cell in (
    Cell("1", "1.1 B Q4_0, 4 boxes", RANDOM, FOUR),
    Cell("1s", "the same, one box", RANDOM, FOUR[:1]),
    Cell("2", "1.1 B, disks 200/100/50/50", RANDOM, MIXED),
    Cell("2e", "the same, even split", RANDOM, MIXED, flags=("--split", "6,6,5,5")),
    Cell("3", "SmolLM2-135M, 4 boxes", SMOLLM2, SLOW),
    Cell("3s", "the same, one box", SMOLLM2, SLOW[:1]),
    Cell("4", "gemma-3-270m, 4 boxes", GEMMA3, SLOW),
    Cell("4s", "the same, one box", GEMMA3, SLOW[:1]),
    Cell("5", "as 1, 512 prompt tokens", RANDOM, FOUR, prompt=512),
    Cell("5n", "the same, no overlap", RANDOM, FOUR, prompt=512, flags=("--no-overlap",)),
    Cell("6", "as 1, only one has the file", RANDOM, FOUR, state="fetch"),
    Cell("6r", "the same, second start", RANDOM, FOUR, state="refetch"),
    Cell("7", "as 1, mpirun from exec", RANDOM, FOUR, state="mpi"),
    Cell("8", "as 1, warm repeat", RANDOM, FOUR, state="warm"),
    Cell("8u", "as 1, unloaded, files cached", RANDOM, FOUR, state="unloaded"),
    Cell("9", "1.1 B, one box, disk as it is", RANDOM, (None,)),
)}
ALSO = {"8": ("8", "8u")}  # what issue-like names stand for


def chosen(text):
    """The cells a list of names stands for, in the table's order; KeyError names the unknown one."""
    names = set()
    for name in text.split(","):
        if name not in CELLS:
            raise KeyError(name)
        names.update(ALSO.get(name, (name,)))
    return [cell for cell in CELLS.values() if cell.name in names]


def model_path(subject):
    """The model's file; the random one is written when it is missing."""
    path = os.path.join(pool.MODELS, subject.name + ".gguf")
    if subject is RANDOM and not os.path.exists(path):
        if not os.access(pool.program("mkmodel"), os.X_OK):
            raise FileNotFoundError(f"'mkmodel' is not built in {pool.BUILD}; run: cmake --preset release && cmake --build "
                                    "--preset release")
        os.makedirs(pool.MODELS, exist_ok=True)
        subprocess.run([pool.program("mkmodel"), "--seed", "1", "--out", path], check=True)
    if not os.path.exists(path):
        raise FileNotFoundError(f"model {subject.name} is not in {pool.MODELS}; {subject.how}")
    return path
