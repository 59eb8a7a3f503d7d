"""One cell of the cold benchmark, run: a new cluster for every repeat, a verified state before each."""
import json
import os
import signal
import statistics
import time

import cold_limit
import page_cache
import pool
from cold_boxes import Refused

THREADS = 1  # of a node; the boxes share this machine's cores
SETTLE_S = 0.3
WARM_RUNS = 3
TOKENS = 4  # asked for, so that more than the first can be compared
SUM_TOLERANCE_MS = 0.05
MPI_WAIT_S = 60
LOAD_WAIT_S = 300
TIMELINE_WAIT_S = 5
FILL_TRIES = 6
STAMP_AND_EXEC = """
import os, sys, time
with open(sys.argv[1], "w") as file:
    file.write(repr(time.monotonic()))
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ColdPool(pool.Pool):
    """A coordinator on the first box and a node on each."""

    def __init__(self, boxes, cell):
        self.boxes, self.cell = boxes, cell
        self.fetching = cell.state in ("fetch", "refetch")
        super().__init__(nodes=0, wait=False, threads=THREADS, coordinator=cell.flags, env=boxes.environment)

    def start_coordinator(self):
        """Called while the pool is made: nothing starts before start_all()."""
        self.key = self.boxes.key_file
        self.join = f"{self.boxes.address(self.boxes.names[0])}:{self.boxes.free_port()}"
        self.address = f"unix:{self.path('client.sock')}"

    def client_env(self):
        return {"FIRSTLIGHT_ADDR": self.address}  # a Unix socket asks for no key

    def coordinator_line(self):
        return [pool.program("firstlight-coordinator"), "--client-listen", self.address, "--models",
                self.boxes.path(self.boxes.names[0], "models"), *self.coordinator_arguments]

    def node_line(self, name, *more):
        line = [pool.program("firstlight-node"), "--name", name, "--threads", str(self.threads), "--cache",
                self.boxes.path(name, "cache"), *more]
        return line if self.fetching else [*line, "--models", self.boxes.path(name, "models")]

    def start_all(self):
        self.coordinator = self.start("coordinator", self.boxes.inside(self.boxes.names[0], [
            *self.coordinator_line(), "--listen", self.join, *self.key_arguments()]))
        for box in self.boxes.names:
            self.nodes[box] = self.start(box, self.boxes.inside(box, [
                *self.node_line(box), "--join", self.join, *self.key_arguments()]))
        self.wait_for(len(self.boxes.names))
        time.sleep(SETTLE_S)

    def mpirun_line(self):
        line = ["mpirun", "--bind-to", "none", *self.boxes.mpirun_arguments]
        if os.geteuid() == 0:
            line.append("--allow-run-as-root")
        first = self.boxes.names[0]
        line += [*self.boxes.mpirun_host(first), "-np", "1", *self.coordinator_line()]
        for box in self.boxes.names:
            line += [":", *self.boxes.mpirun_host(box), "-np", "1", *self.node_line(box)]
        return line

    def launch_mpi(self):
        """Start, and return when every node has joined: the moment of mpirun's exec, on the monotonic clock."""
        stamp = self.path("exec-at")
        self.mpirun = self.start("mpirun", self.boxes.inside(self.boxes.names[0], [
            "python3", "-S", "-c", STAMP_AND_EXEC, stamp, *self.mpirun_line()]))
        deadline = time.monotonic() + MPI_WAIT_S
        while not (os.path.exists(self.path("client.sock")) and self.joined(len(self.boxes.names))):
            if time.monotonic() > deadline or not self.mpirun.alive():
                raise Refused(f"mpirun formed no cluster: {self.last_words()}")
            time.sleep(0.002)
        with open(stamp, encoding="ascii") as file:
            return float(file.read())

    def ask(self, *prompt, tokens=TOKENS):
        return ready_json(self.generate(self.cell.subject.name, *prompt, "--max-tokens", str(tokens), "--ignore-end",
                                        timeout=300))

    def ask_other(self, number, tokens=TOKENS):
        """A prompt of the cell's length whose beginning nobody asked before: kept KV must not answer it."""
        ids = [10 + (number * 37 + place * 13) % 200 for place in range(self.cell.prompt)]
        return self.ask("--tokens", pool.tokens_text(ids), tokens=tokens)

    def wait_loaded(self):
        def complete():
            loaded = [one for one in self.status().get("loaded", []) if one["model"] == self.cell.subject.name]
            return loaded and all(stage["bytes_done"] == stage["bytes_total"] for stage in loaded[0]["stages"])
        deadline = time.monotonic() + LOAD_WAIT_S
        while not complete():
            if time.monotonic() > deadline:
                raise Refused(f"the model is not loaded after {LOAD_WAIT_S} s: {self.status().get('loaded')}")
            time.sleep(0.05)

    def timeline(self, number):
        """Of the answer that has this number.  It is kept once every node has told its spans."""
        deadline = time.monotonic() + TIMELINE_WAIT_S
        while True:
            answer = self.run("timeline", str(number), "--json", timeout=60)
            if answer.status == 0 or time.monotonic() > deadline:
                return ready_json(answer)
            time.sleep(0.1)

    def wait_for(self, nodes, seconds=30):
        try:
            super().wait_for(nodes, seconds)
        except AssertionError:
            raise Refused(f"{nodes} nodes have not joined within {seconds} s: {self.last_words()}") from None

    def last_words(self):
        return "; ".join(line for process in self.started for line in process.log().strip().splitlines()[-1:])

    def __exit__(self, kind, value, trace):
        """Whoever catches the exception says what happened; an interrupt waits until all processes have ended."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def waterfall(self, number):
        answer = self.run("timeline", str(number), timeout=60)
        return answer.out if answer.status == 0 else None


def ready_json(answer):
    if answer.status != 0:
        raise Refused((answer.err.strip() or f"{answer.arguments[0]} exited {answer.status}").splitlines()[-1])
    return json.loads(answer.out)


class Run:
    """What one repeat gave."""

    def __init__(self, answer, cluster, ttft_ms=None):
        self.answer = answer
        self.ttft_ms = ttft_ms if ttft_ms is not None else answer["ttft_ms"]
        number = answer.get("timeline_id")
        self.timeline = cluster.timeline(number) if number else None
        self.waterfall = cluster.waterfall(number) if number else None
        self.share_before = None  # of the boxes' files in the page cache

    def exposed(self):
        """Milliseconds of each phase on the way to the first token."""
        phases = {}
        for segment in self.timeline["exposed"] if self.timeline else []:
            phases[segment["phase"]] = phases.get(segment["phase"], 0.0) + segment["ms"]
        if self.ttft_ms > self.answer["ttft_ms"]:
            phases["launch"] = self.ttft_ms - self.answer["ttft_ms"]
        return phases

    def check(self, cell, known):
        found = self.answer.get("class")
        if found not in ("cold", "partial", "warm"):
            raise Refused(f"the answer's class is {found!r}: what it found in memory is unknown")
        if cell.wanted_class not in (None, found):
            raise Refused(f"an answer was {found} where a {cell.wanted_class} one is wanted")
        if self.answer["prompt_tokens"] != cell.prompt and known is not None:
            raise Refused(f"the prompt has {self.answer['prompt_tokens']} tokens, {cell.prompt} are wanted")
        if self.answer["cached_tokens"] > 1:
            raise Refused(f"{self.answer['cached_tokens']} tokens of the prompt came from a kept conversation")
        if self.timeline:
            self.check_timeline(cell)

    def check_timeline(self, cell):
        total = sum(segment["ms"] for segment in self.timeline["exposed"])
        if abs(total - self.timeline["ttft_ms"]) > SUM_TOLERANCE_MS:
            raise Refused(f"the exposed chain sums to {total:.3f} ms, the first token took "
                          f"{self.timeline['ttft_ms']:.3f} ms")
        for node in self.timeline["nodes"]:
            if cell.wanted_class == "cold" and (node.get("page_cache_before") or 0) > 0.01:
                raise Refused(f"{node['node']} found {node['page_cache_before']:.0%} of its shard in the page cache")


class Bench:
    """Runs cells on boxes that stay; remembers answers, which must not differ."""

    def __init__(self, boxes, repeat, strict=True, say=print):
        self.boxes, self.repeat, self.strict, self.say = boxes, repeat, strict, say
        self.answers = {}

    def run(self, cell):
        """(runs, least warm milliseconds for the same prompt)."""
        how = {"cold": self.cold, "fetch": self.cold, "refetch": self.refetch, "mpi": self.mpi, "warm": self.warm,
               "unloaded": self.unloaded}
        runs, warm_ms = how[cell.state](cell)
        for one in runs:
            one.check(cell, True if self.strict else None)
            self.same_answer(cell, one)
        classes = {one.answer["class"] for one in runs}
        if len(classes) > 1:
            raise Refused(f"some answers were {' and some '.join(sorted(classes))}: these are never put together")
        return runs, warm_ms

    def same_answer(self, cell, run):
        if cell.state in ("warm", "unloaded"):
            return  # other prompts
        tokens = run.answer["tokens"]
        before = self.answers.setdefault((cell.subject.name, cell.prompt), tokens)
        if any(one != other for one, other in zip(tokens, before)):
            raise Refused(f"the answer is {tokens}, an earlier one to the same prompt {before}")

    def cluster(self, cell, fresh_caches=True):
        """One about to start on cold boxes."""
        if fresh_caches:
            for box in self.boxes.names:
                self.boxes.clear_cache(box)
        self.boxes.make_cold()
        return ColdPool(self.boxes, cell)

    def prompt(self, cell):
        return "--prompt", cell.subject.prompts[cell.prompt]

    def ask_cold(self, cluster, cell):
        share = self.boxes.check_cold()
        run = Run(cluster.ask(*self.prompt(cell)), cluster)
        run.share_before = share
        self.say(f"  {run.ttft_ms:.1f} ms ({run.answer['class']})")
        return run

    def warm_ms(self, cluster):
        cluster.wait_loaded()
        return min(cluster.ask_other(number)["ttft_ms"] for number in range(WARM_RUNS))

    def repeats(self, cell, fresh_caches=True):
        runs, warm_ms = [], None
        for number in range(self.repeat):
            with self.cluster(cell, fresh_caches) as cluster:
                cluster.start_all()
                runs.append(self.ask_cold(cluster, cell))
                if number == self.repeat - 1:
                    warm_ms = self.warm_ms(cluster)
        return runs, warm_ms

    def cold(self, cell):
        return self.repeats(cell)

    def refetch(self, cell):
        """The first start fills the caches, and is cell 6's to measure."""
        with self.cluster(cell) as cluster:
            cluster.start_all()
            cluster.ask(*self.prompt(cell))
            cluster.wait_loaded()
        return self.repeats(cell, fresh_caches=False)

    def mpi(self, cell):
        runs, warm_ms = [], None
        for number in range(self.repeat):
            with self.cluster(cell) as cluster:
                share = self.boxes.check_cold()
                started = cluster.launch_mpi()
                answer = cluster.ask(*self.prompt(cell), tokens=1)
                run = Run(answer, cluster, 1000 * (time.monotonic() - started))
                run.share_before = share
                runs.append(run)
                self.say(f"  {run.ttft_ms:.1f} ms from exec, {answer['ttft_ms']:.1f} ms from the request "
                         f"({answer['class']})")
                if number == self.repeat - 1:
                    warm_ms = self.warm_ms(cluster)
        return runs, warm_ms

    def warm(self, cell):
        with self.cluster(cell) as cluster:
            cluster.start_all()
            cluster.ask(*self.prompt(cell))
            cluster.wait_loaded()
            runs = []
            for number in range(self.repeat):
                runs.append(Run(cluster.ask_other(number), cluster))
                self.say(f"  {runs[-1].ttft_ms:.1f} ms ({runs[-1].answer['class']})")
        return runs, min(run.ttft_ms for run in runs)

    @staticmethod
    def fill_page_cache(files):
        """Somebody else may empty it meanwhile: a few tries."""
        for _ in range(FILL_TRIES):
            page_cache.fill(files)
            share = page_cache.share(files)
            if share > 0.99:
                return share
        raise Refused(f"the page cache keeps only {share:.0%} of the files; is there memory for them, does something "
                      "drop it?")

    def unloaded(self, cell):
        """The page cache is filled by reading the files, so that it does not matter how a loader reads."""
        runs, models = [], [path for path in self.boxes.files() if path.endswith(".gguf")]
        with self.cluster(cell) as cluster:
            cluster.start_all()
            while len(runs) < self.repeat:
                runs.append(self.ask_unloaded(cluster, cell, models, len(runs)))
                self.say(f"  {runs[-1].ttft_ms:.1f} ms ({runs[-1].answer['class']})")
            warm_ms = min(cluster.ask_other(self.repeat + number)["ttft_ms"] for number in range(WARM_RUNS))
        return runs, warm_ms

    def ask_unloaded(self, cluster, cell, models, number):
        """When the page cache was emptied by somebody else meanwhile, once more."""
        for _ in range(FILL_TRIES):
            cluster.ask(*self.prompt(cell))
            cluster.wait_loaded()
            done = cluster.run("unload", cell.subject.name)
            if done.status != 0:
                raise Refused(f"the model could not be unloaded: {done.err.strip()}")
            share = self.fill_page_cache(models)
            run = Run(cluster.ask_other(number), cluster)
            run.share_before = share
            if page_cache.share(models) > 0.99:
                break
        return run


def spread(values):
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3),
            "runs": [round(value, 3) for value in values]}


def limit_of(cell, model, rates, warm_ms):
    """The least of all plans; rates are those measured on these boxes."""
    cached = rates.get("cached")
    speeds = {"warm": lambda _: float("inf"), "unloaded": lambda _: cached}.get(cell.state, lambda disk: disk)
    boxes = [cold_limit.Box(speeds(disk), link) for disk, link in zip(rates["disk"], rates["link"])]
    work = cold_limit.Work(layers=tuple(model.layers), head=model.head, embed_row=model.embed_row, width=model.width,
                           prompt=cell.prompt, compute_s=warm_ms / 1000,
                           source=0 if cell.state == "fetch" else None)
    return cold_limit.least(work, boxes)
