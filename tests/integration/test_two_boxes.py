#!/usr/bin/env python3
"""Two boxes and a client, each a network namespace with its own address, as docs/your-own-boxes.md sets them up.

Needs root and iproute2.  Everything it makes carries the process number and is
removed in any case.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

MODEL = cluster.SMOLLM2
DATA_PORTS = (7420, 7439)
PROMPT = ("--prompt", "The capital of France is", "--max-tokens", "6", "--top-logits", "5")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Boxes(cluster.Pool):
    """box1 with the coordinator, box2, and a client's machine, joined by a bridge in a fourth namespace."""

    def __init__(self):
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise cluster.Skip("network namespaces need root and iproute2")
        self.prefix = f"flt{os.getpid()}"
        self.places = {"box1": "10.77.31.1", "box2": "10.77.31.2", "client": "10.77.31.3"}
        self.spaces = []
        self.tables = tempfile.mkdtemp(prefix="firstlight-keys.")
        try:
            self.make_network()
            super().__init__(nodes=0, wait=False)
        except BaseException:
            self.remove_network()
            raise

    def space(self, box):
        return f"{self.prefix}{box}"

    def make_network(self):
        try:
            self.make_space("switch")
        except subprocess.CalledProcessError as error:
            raise cluster.Skip(f"no network namespaces here: {error.stderr.decode().strip()}") from None
        ip("-n", self.space("switch"), "link", "add", "br0", "type", "bridge")
        ip("-n", self.space("switch"), "link", "set", "br0", "up")
        for number, (box, address) in enumerate(self.places.items()):
            self.make_space(box)
            far = f"port{number}"
            ip("-n", self.space(box), "link", "add", "eth0", "type", "veth", "peer", "name", far, "netns",
               self.space("switch"))
            ip("-n", self.space("switch"), "link", "set", far, "master", "br0", "up")
            ip("-n", self.space(box), "address", "add", f"{address}/24", "dev", "eth0")
            self.link(box, "up")

    def make_space(self, box):
        ip("netns", "add", self.space(box))
        self.spaces.append(self.space(box))
        ip("-n", self.space(box), "link", "set", "lo", "up")

    def link(self, box, state):
        ip("-n", self.space(box), "link", "set", "eth0", state)

    def silence(self, box, silent):
        """The box's cable, at the switch's end: the box itself sees nothing."""
        number = list(self.places).index(box)
        ip("-n", self.space("switch"), "link", "set", f"port{number}", "nomaster" if silent else "master",
           *([] if silent else ["br0"]))

    def remove_network(self):
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True, timeout=20)
        shutil.rmtree(self.tables, ignore_errors=True)

    def inside(self, box, line):
        return ["ip", "netns", "exec", self.space(box), *line]

    def start_coordinator(self):
        """The configuration of the examples with this network's addresses."""
        self.key = self.path("pool.key")
        subprocess.run([cluster.program("firstlight"), "keygen", "--out", self.key], check=True, capture_output=True,
                       timeout=20)
        with open(os.path.join(cluster.ROOT, "cluster/examples/three-boxes.json"), encoding="utf-8") as example:
            config = json.load(example)
        config["coordinator"].update(models=self.models, key_file=self.key, context=512)
        config["node"].update(join=f"{self.places['box1']}:7412", key_file=self.key)
        config["nodes"] = [{"name": "box1", "memory": "1GiB"}, {"name": "box2", "memory": "1GiB"}]
        with open(self.path("pool.json"), "w", encoding="utf-8") as out:
            json.dump(config, out)
        self.address = f"{self.places['box1']}:7411"
        self.coordinator = self.start("coordinator", self.inside("box1", [
            cluster.program("firstlight-coordinator"), "--config", self.path("pool.json")]))

    def start_box(self, box, *more):
        self.nodes[box] = self.start(box, self.inside(box, [
            cluster.program("firstlight-node"), "--config", self.path("pool.json"), "--name", box, "--threads", "1",
            "--cache", self.path(f"cache-{box}"), *more]))
        return self.nodes[box]

    def run(self, *arguments, timeout=120, **_):
        done = subprocess.run(self.inside("client", [cluster.program("firstlight"), *arguments]), capture_output=True,
                              timeout=timeout, env={**os.environ, **self.client_env()}, check=False)
        return cluster.Answer(arguments, done.returncode, done.stdout.decode("utf-8", "replace"),
                              done.stderr.decode("utf-8", "replace"))

    def close(self):
        super().close()
        self.remove_network()

    def listening(self, box):
        lines = subprocess.run(self.inside(box, ["ss", "-Hltn"]), check=True, capture_output=True, text=True,
                               timeout=20).stdout.splitlines()
        return sorted({int(line.split()[3].rsplit(":", 1)[1]) for line in lines})


def one_node_answer():
    with cluster.Pool(nodes=1) as pool:
        return pool.generate(MODEL, *PROMPT).json()


def same_answer(answer, want):
    assert answer["tokens"] == want["tokens"], (answer["tokens"], want["tokens"])
    assert answer["top_logits"] == want["top_logits"]


def two_boxes_answer_as_one_does():
    cluster.need_model(MODEL)
    want = one_node_answer()
    with Boxes() as pool:
        pool.start_box("box1")
        pool.start_box("box2")
        pool.wait_for(2)
        answer = pool.generate(MODEL, *PROMPT).json()
        same_answer(answer, want)
        assert [stage["node"] for stage in answer["stages"]] == ["box1", "box2"], answer["stages"]
        if shutil.which("ss") is not None:
            for box in ("box1", "box2"):
                strange = [port for port in pool.listening(box)
                           if port not in (7411, 7412, 7413) and not DATA_PORTS[0] <= port <= DATA_PORTS[1]]
                assert not strange, f"{box} listens on {strange}, which a firewall would not know of"


def a_wrong_key_is_named():
    with Boxes() as pool:
        pool.start_box("box1")
        pool.wait_for(1)
        wrong = pool.path("wrong.key")
        subprocess.run([cluster.program("firstlight"), "keygen", "--out", wrong], check=True, capture_output=True,
                       timeout=20)
        node = pool.start_box("box2", "--key-file", wrong)
        cluster.wait_until(lambda: "key" in node.log(), 10, "the node says why it cannot join")
        assert "coordinator" in node.log() and "another pool key" in node.log(), node.log()
        assert pool.ready() == ["box1"]


def a_box_started_before_its_network_joins_later():
    cluster.need_model(MODEL)
    with Boxes() as pool:
        pool.start_box("box1")
        pool.link("box2", "down")
        ip("-n", pool.space("box2"), "address", "flush", "dev", "eth0")
        node = pool.start_box("box2")
        time.sleep(2)
        assert node.alive(), node.log()
        pool.link("box2", "up")
        ip("-n", pool.space("box2"), "address", "add", "10.77.31.2/24", "dev", "eth0")
        pool.wait_for(2)
        assert len(pool.generate(MODEL, *PROMPT).json()["stages"]) == 2


def a_silent_link_ends_the_request_and_heals():
    cluster.need_model(MODEL)
    with Boxes() as pool:
        pool.start_box("box1")
        pool.start_box("box2")
        pool.wait_for(2)
        want = pool.generate(MODEL, *PROMPT).json()
        running = subprocess.Popen(
            pool.inside("client", [cluster.program("firstlight"), "generate", "--model", MODEL, "--prompt", "Count:",
                                   "--max-tokens", "400", "--ignore-end"]),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **pool.client_env()})
        assert running.stdout.read(1), "no text came"
        pool.silence("box2", True)
        started = time.monotonic()
        _, err = running.communicate(timeout=30)
        seconds = time.monotonic() - started
        assert running.returncode == 1 and b"box2" in err, (running.returncode, err)
        assert seconds < 8, f"noticed only after {seconds:.1f} s"
        pool.silence("box2", False)
        # Box1 may have noticed first; the coordinator's own five seconds end soon after.
        cluster.wait_until(lambda: "node box2 was lost" in pool.coordinator.log(), 10, "the coordinator notices")
        pool.wait_for(2)
        same_answer(pool.generate(MODEL, *PROMPT).json(), want)


if __name__ == "__main__":
    cluster.main([two_boxes_answer_as_one_does, a_wrong_key_is_named, a_box_started_before_its_network_joins_later,
                  a_silent_link_ends_the_request_and_heals])
