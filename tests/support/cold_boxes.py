"""The boxes a cold cell runs on: hosts of the lab, or plain folders on this machine.

Each box has a folder of its own with a copy of the model and its shard cache.  The coordinator lives
on the first box, beside a node.

PlainBoxes  loopback, nothing throttled; for trying things out and for machines without root
LabBoxes    network namespaces with throttled disks and links (cluster/lab/lab)
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import page_cache
import pool
from owned_folder import OwnedFolder

sys.path.insert(0, os.path.join(pool.ROOT, "cluster", "lab"))
from state import State

PROBE = os.path.join(pool.ROOT, "tests", "support", "rate_probe.py")
LAB = os.path.join(pool.ROOT, "cluster", "lab", "lab")
LAB_FOLDER = "/var/tmp"
LAB_PORTS = 20000
PREFIX = "firstlight-cold."


class Refused(Exception):
    """A result that would not mean what its cell says."""


class NoLab(Refused):
    """This machine cannot have a lab."""


def probe_result(process, what):
    out, err = process.communicate(timeout=120)
    if process.returncode != 0:
        raise Refused(f"{what} could not be measured: {(err.strip() or 'no reason given').splitlines()[-1]}")
    return json.loads(out.splitlines()[-1])["bytes_s"]


class PlainBoxes:
    """Boxes that are folders; what a box is and does is changed by LabBoxes."""

    kind = "plain processes on loopback, nothing throttled"
    processor = "shared with whatever else runs"
    environment = {}
    key_file = None  # of the pool; loopback needs none
    mpirun_arguments = ("--oversubscribe",)
    disk_probe_s, link_probe_s, probes = 0.5, 0.2, 1  # nothing gives in slices

    def __init__(self, count):
        self.all_names = [f"box{number + 1}" for number in range(count)]
        self.names, self.disks, self.link = self.all_names, [None] * count, None
        self.model = None
        self.start()

    @staticmethod
    def place():
        """Where the boxes' folders will be."""
        return tempfile.gettempdir()

    def start(self):
        self.own = OwnedFolder(PREFIX)
        self.folder = self.own.path
        for name in self.all_names:
            os.makedirs(self.path(name, "models"))

    def close(self):
        self.own.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # whoever is impatient must not leave half of it behind
        self.close()

    def path(self, box, *parts):
        return os.path.join(self.folder, box, *parts)

    def address(self, box):  # pylint: disable=unused-argument
        return "127.0.0.1"

    def free_port(self):
        return pool.free_port()

    def inside(self, box, line):  # pylint: disable=unused-argument
        """The command line that runs `line` on a box."""
        return line

    def mpirun_host(self, box):  # pylint: disable=unused-argument
        """What tells mpirun that the next program belongs on this box."""
        return ()

    def use(self, disks, link, model):
        """The first boxes with these disks, each with its own copy of the model."""
        self.names = self.all_names[:len(disks)]
        self.set_rates(disks, link)
        for box in self.all_names:
            self.clear_cache(box)
        if model != self.model:
            for box in self.all_names:
                for old in os.listdir(self.path(box, "models")):
                    os.unlink(self.path(box, "models", old))
            self.put_model(model)
            self.model = model

    def set_rates(self, disks, link):  # pylint: disable=unused-argument
        self.disks = [None] * len(disks)

    def put_model(self, model):
        for box in self.all_names:
            copy = self.path(box, "models", os.path.basename(model))
            shutil.copyfile(model, copy)
            with open(copy, "rb") as file:
                os.fsync(file.fileno())

    def clear_cache(self, box):
        shutil.rmtree(self.path(box, "cache"), ignore_errors=True)

    def files(self):
        """Every file that bytes of the model may come from."""
        return [os.path.join(folder, name) for box in self.names for folder, _, names in os.walk(self.path(box))
                for name in names]

    def make_cold(self):
        """No byte of the boxes' files is in the page cache any more, or Refused."""
        page_cache.drop(self.files())
        self.check_cold()

    def check_cold(self):
        """The share in the page cache just before a request.  Programs that start may have looked at a file's header:
        that is let go of once more."""
        if page_cache.share(self.files()) > 0:
            page_cache.drop(self.files())
        for path in self.files():
            there, pages = page_cache.resident(path)
            if there > 0:
                raise Refused(f"{path} is still in the page cache, {there} of {pages} pages; does another process "
                              "map it?")
        return 0.0

    # ---- rates, as a program on the box finds them

    def measure_disks(self):
        """Bytes a second of each box's disk, all at once, as a cold start uses them; the best of a few tries, for a
        limit must not be missed from below."""
        tries = [self.measure_disks_once(self.disk_probe_s) for _ in range(self.probes)]
        return [max(rates) for rates in zip(*tries)]

    def measure_disks_once(self, seconds):
        name = os.path.basename(self.model)
        running = [self.probe(box, "disk", self.path(box, "models", name), str(seconds)) for box in self.names]
        return [probe_result(process, f"the disk of {box}") for box, process in zip(self.names, running)]

    def measure_cached(self, rounds=3):
        """Bytes a second of a file in the page cache: the best of a few, for the first may have to fill it."""
        box = self.names[0]
        path = self.path(box, "models", os.path.basename(self.model))
        page_cache.fill([path])
        return max(probe_result(self.probe(box, "cached", path), f"the page cache of {box}") for _ in range(rounds))

    def measure_links(self):
        """Bytes a second that leave each box, to its neighbour; again the best."""
        if len(self.names) == 1:
            return [float("inf")]
        return [max(self.measure_link(box, self.names[number - 1], self.link_probe_s) for _ in range(self.probes))
                for number, box in enumerate(self.names)]

    def measure_link(self, sender, receiver, seconds):
        rest = [self.address(receiver), str(self.free_port()), str(seconds)]
        listener = self.probe(receiver, "receive", *rest)
        listener.stdout.readline()  # ready
        try:
            probe_result(self.probe(sender, "send", *rest), f"the link from {sender} to {receiver}")
        except Refused:
            listener.kill()
            raise
        return probe_result(listener, f"the link from {sender} to {receiver}")

    def probe(self, box, *arguments):
        return subprocess.Popen(self.inside(box, ["python3", PROBE, *arguments]), stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)


def lab(*arguments):
    """What a command of the lab printed; Refused with its sentence."""
    try:
        done = subprocess.run([LAB, *arguments], capture_output=True, text=True, timeout=600, check=False)
    except OSError as why:
        raise Refused(f"the lab cannot be started: {LAB}: {why.strerror}") from None
    if done.returncode != 0:
        kind = NoLab if done.returncode == 77 else Refused
        raise kind((done.stderr.strip() or f"lab {arguments[0]} failed").splitlines()[-1])
    return done.stdout


class LabBoxes(PlainBoxes):
    """Hosts of a lab that is up for as long as this object is open."""

    kind = "hosts of cluster/lab: network namespaces with throttled disks and links on one machine"
    processor = "the boxes share this machine's cores, and go before everything else by 100 to 1"  # as lab up sees to
    mpirun_arguments = ("--oversubscribe", "--mca", "plm_rsh_agent",
                        os.path.join(pool.ROOT, "cluster", "lab", "agent"))
    disk_probe_s, link_probe_s, probes = 1.5, 0.8, 2

    @staticmethod
    def place():
        return LAB_FOLDER

    def start(self):
        self.ports = 0
        self.own = OwnedFolder(PREFIX)
        path = os.path.join(self.own.path, "lab.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"folder": LAB_FOLDER, "hosts": [{"name": name} for name in self.all_names]}, file)
        if State().read() is not None:  # somebody else's: an interrupt must not take it down
            self.own.close()
            raise Refused("a lab is up already; one at a time: 'cluster/lab/lab down' first")
        try:
            lab("up", path)
        except Refused:
            self.own.close()
            raise
        except BaseException:  # interrupted half-way
            self.close()
            raise
        try:
            hosts = json.loads(lab("status", "--json"))["hosts"]
            self.folders = {host["name"]: host["folder"] for host in hosts}
            self.addresses = {host["name"]: host["address"] for host in hosts}
            self.key_file = os.path.join(self.own.path, "pool.key")
            subprocess.run([pool.program("firstlight"), "keygen", "--out", self.key_file], check=True,
                           capture_output=True, timeout=60)
        except BaseException:
            self.close()
            raise

    def close(self):
        self.own.close()
        lab("down")

    def path(self, box, *parts):
        return os.path.join(self.folders[box], *parts)

    def address(self, box):
        return self.addresses[box]

    def free_port(self):
        """A new one each time, below those that the kernel gives to connections: what is free on this machine says
        nothing about a host."""
        self.ports += 1
        return LAB_PORTS + self.ports % 10000

    def inside(self, box, line):
        return [LAB, "exec", box, "--", *line]

    def mpirun_host(self, box):
        return ("-H", box)

    def set_rates(self, disks, link):
        self.disks, self.link = list(disks), link
        for box, disk in zip(self.names, disks):
            lab("set", box, "disk=none" if disk is None else f"disk={disk // 1000}kB/s", f"link={link * 8 // 1000}kbit/s")

    def put_model(self, model):
        lab("put", "all", model)

    def make_cold(self):
        lab("cold")
        self.check_cold()
