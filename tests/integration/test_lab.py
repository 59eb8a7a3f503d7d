#!/usr/bin/env python3
"""The lab of slow hosts: what it refuses, and what its limits do.

Needs root, tc and control groups, and skips with the reason where one is missing.
Rates are only checked in the direction that a busy machine cannot fake: that a
throttled read or copy takes long enough.  tests/bench/lab measures them.
"""
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool as cluster
from pool import ROOT, Skip, wait_until
from slow_hosts import AGENT, LAB, LISTEN, MB, SEND, Lab, forget, need_lab
import cgroup
import disk
import hosts_file
import residency
from hosts_file import LabError

READ = """
import mmap, os, sys, time
how, path = sys.argv[1:]
block = mmap.mmap(-1, 1 << 20)
file = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
start = time.monotonic()
if how == "mapped":
    view = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    sum(view[place] for place in range(0, len(view), 4096))
else:
    while os.readv(file, [block]) > 0:
        pass
print(time.monotonic() - start)
"""


def raises(sentence, function, *arguments):
    try:
        function(*arguments)
    except LabError as error:
        assert sentence in str(error), f"no \"{sentence}\" in: {error}"
        return
    raise AssertionError(f"accepted: {arguments}")


# ---- without a lab: parsers, devices, what is written for which version of control groups

def a_lab_file_of_nonsense_is_refused_with_a_sentence():
    host = {"name": "box1"}
    files = [
        ("", "is no JSON"), ("\0\1", "is no JSON"), ("[" * 100000, "is no JSON"), ("[]", "no object"), ("{}", "no list"),
        ({"hosts": []}, "no list of 1 to"), ({"hosts": [{"name": f"b{i}"} for i in range(65)]}, "no list of 1 to 64"),
        ({"hosts": [host], "speed": 1}, 'unknown key "speed"'), ({"hosts": [{**host, "dsk": "1MB/s"}]}, 'unknown key "dsk"'),
        ('{"hosts": [{"name": "a", "name": "b"}]}', '"name" is there twice'),
        ({"hosts": [host, {"name": "box2"}, host]}, 'two hosts are named "box1"'), ({"hosts": ["box1"]}, "host 1 is"),
        ({"hosts": [{}]}, "has the name null"), ({"hosts": [{"name": "Box 1"}]}, "1 to 31 of a-z"),
        ({"hosts": [{"name": "a" * 32}]}, "1 to 31"), ({"hosts": [{"name": "../etc"}]}, "1 to 31"),
        ({"hosts": [{"name": "all"}]}, "something else"), ({"hosts": [{**host, "files": "x"}]}, "no list"),
        ({"hosts": [{**host, "files": [1]}]}, "a path would be right"),
        ({"hosts": [{**host, "files": ["a/x", "b/x"]}]}, "two files are named x"),
        ({"hosts": [host], "folder": 5}, "the path of a folder"),
        ({"hosts": [{**host, "files": ["\ud800"]}]}, "a path would be right"), ({"hosts": [host], "folder": ""}, "the path of a"), ({"hosts": [host], "folder": "a\0b"}, "path of a folder"),
    ]
    for key, values in {
            "disk": ["0MB/s", "0.0MB/s", "-1MB/s", "100", "100MB", "100Mbit/s", "1e9MB/s", "200GB/s", "1B/s", 100, True, "MB/s"],
            "link": ["0Gbit/s", "1Gbit", "100MB/s", "1bit/s", "200Gbit/s", 1, []],
            "memory": ["0GiB", "1KiB", "99TiB", "8GiB/s", 8, "8 gigabytes"],
            "cpu": [0, -1, "1", 0.01, 5000, True, float("nan"), float("inf")]}.items():
        files += [({"hosts": [{**host, key: value}]}, f"box1: {key} is") for value in values]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lab.json")
        for content, sentence in files:
            with open(path, "w", encoding="utf-8") as file:
                file.write(content if isinstance(content, str) else json.dumps(content))
            raises(sentence, hosts_file.read, path)
            raises(path, hosts_file.read, path)
        with open(path, "wb") as file:
            file.write(b"\xff\xfe{}")
        raises("is no JSON", hosts_file.read, path)
        with open(path, "wb") as file:
            file.write(b" " * (hosts_file.FILE_BYTES_MAX + 1))
        raises("is longer than", hosts_file.read, path)
        raises("cannot be read", hosts_file.read, folder)
        raises("cannot be read", hosts_file.read, path + "x")


def a_lab_file_says_what_it_means():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lab.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"folder": "there", "hosts": [{"name": "a", "disk": "1.5MB/s", "link": "64 kbit/s", "memory": "16MiB",
                                                     "cpu": 0.05, "files": ["x", "/y"]}, {"name": "b-2", "disk": None}]}, file)
        read = hosts_file.read(path)
        assert read.folder == os.path.join(folder, "there")
        one, two = read.hosts
        assert (one.disk, one.link, one.memory, one.cpu) == (1500000, 64000, 16 << 20, 0.05)
        assert one.files == [os.path.join(folder, "x"), "/y"]
        assert (two.name, two.disk, two.link, two.memory, two.cpu, two.files) == ("b-2", None, None, None, None, [])
    for name in ("4-equal", "4-mixed", "nas"):
        assert len(hosts_file.read(os.path.join(ROOT, "cluster", "lab", name + ".json")).hosts) == 4


def an_amount_is_written_as_short_as_it_can_be():
    for value, units, text in ((100 * MB, hosts_file.BYTES, "100MB"), (8 << 30, hosts_file.BYTES, "8GiB"),
                               (1500000, hosts_file.BYTES, "1500kB"), (123, hosts_file.BYTES, "123B"),
                               (10**9, hosts_file.BITS, "1Gbit"), (None, hosts_file.BITS, "-")):
        assert hosts_file.amount(value, units) == text, (value, hosts_file.amount(value, units))


def a_partition_is_traced_to_its_disk():
    with tempfile.TemporaryDirectory() as folder:
        part = os.path.join(folder, "devices", "sda", "sda1")
        os.makedirs(part)
        os.makedirs(os.path.join(folder, "block"))
        for path, text in (("sda/dev", "8:0\n"), ("sda/sda1/dev", "8:1\n"), ("sda/sda1/partition", "1\n")):
            with open(os.path.join(folder, "devices", path), "w", encoding="ascii") as file:
                file.write(text)
        devices = os.path.join(folder, "block")
        os.symlink("../devices/sda", os.path.join(devices, "8:0"))
        os.symlink("../devices/sda/sda1", os.path.join(devices, "8:1"))
        whole = ("8:0", os.path.realpath(os.path.dirname(part)))
        assert disk.whole_disk("8:1", devices) == whole and disk.whole_disk("8:0", devices) == whole


def both_versions_of_control_groups_get_what_they_understand():
    def mount(point, kind, options):
        return ("0:1", "/", point, kind, kind, options.split(","))

    def fill(folder, *names):
        os.makedirs(folder, exist_ok=True)
        for name in names:
            with open(os.path.join(folder, name), "w", encoding="ascii"):
                pass

    def content(*path):
        return cgroup.words(os.path.join(*path))

    with tempfile.TemporaryDirectory() as top:
        v2, blkio, cpu = (os.path.join(top, name) for name in ("v2", "blkio", "cpu,cpuacct"))
        for folder in (v2, os.path.join(v2, "lab")):
            fill(folder, "cgroup.controllers", "cgroup.subtree_control")
        cgroup.put(os.path.join(v2, "cgroup.controllers"), "cpuset cpu io memory pids")
        cgroup.put(os.path.join(v2, "cgroup.subtree_control"), "cpu pids")
        fill(os.path.join(v2, "lab", "box1"), "io.max", "memory.max", "memory.swap.max", "cpu.max", "cgroup.procs")
        fill(os.path.join(blkio, "lab", "box1"), "blkio.throttle.read_bps_device", "cgroup.procs")
        fill(os.path.join(cpu, "lab", "box1"), "cpu.cfs_quota_us", "cpu.cfs_period_us")

        only_v2 = cgroup.Cgroups([mount(v2, "cgroup2", "rw,nsdelegate")])
        only_v2.need()
        fill(os.path.join(v2, "lab"), "cpu.weight")
        only_v2.go_first("lab")
        assert content(v2, "lab", "cpu.weight") == ["10000"]
        assert only_v2.lend_controllers("lab") == ["io", "memory"]
        assert content(v2, "cgroup.subtree_control") == ["+io", "+memory"]
        assert content(v2, "lab", "cgroup.subtree_control") == ["+io", "+memory", "+cpu"]
        for what, value in (("disk", 100 * MB), ("memory", 1 << 30), ("cpu", 0.5)):
            only_v2.limit("lab", "box1", what, value, "8:0")
        box = os.path.join(v2, "lab", "box1")
        assert content(box, "io.max") == ["8:0", "rbps=100000000"] and content(box, "memory.max") == [str(1 << 30)]
        assert content(box, "memory.swap.max") == ["0"] and content(box, "cpu.max") == ["5000", "10000"]
        only_v2.lift_disks("lab")
        for what in ("memory", "cpu"):
            only_v2.limit("lab", "box1", what, None)
        assert content(box, "io.max") == ["8:0", "rbps=max"] and content(box, "cpu.max") == ["max"]
        assert content(box, "memory.max") == ["max"] and content(box, "memory.swap.max") == ["max"]
        cgroup.put(os.path.join(box, "cgroup.procs"), "0\n17\n")
        assert only_v2.pids("lab") == {17} and only_v2.groups("lab", "box1") == [box]

        mixed = cgroup.Cgroups([mount(v2, "cgroup2", "rw"), mount(blkio, "cgroup", "rw,blkio"),
                                mount(cpu, "cgroup", "rw,cpu,cpuacct")])
        assert mixed.places == {"disk": (1, blkio), "memory": (2, v2), "cpu": (1, cpu)}
        mixed.limit("lab", "box1", "disk", 25 * MB, "8:0")
        mixed.limit("lab", "box1", "cpu", 0.05)
        assert content(blkio, "lab", "box1", "blkio.throttle.read_bps_device") == ["8:0", "25000000"]
        assert content(cpu, "lab", "box1", "cpu.cfs_quota_us") == ["1000"]
        assert content(cpu, "lab", "box1", "cpu.cfs_period_us") == ["20000"]
        assert sorted(mixed.groups("lab", "x")) == sorted(os.path.join(root, "lab", "x") for root in (v2, blkio, cpu))
        raises("the kernel refuses disk", mixed.limit, "lab", "box9", "disk", 1, "8:0")

        cgroup.put(os.path.join(v2, "cgroup.controllers"), "cpu memory")
        raises("no cgroup controller for disk", cgroup.Cgroups([mount(v2, "cgroup2", "rw")]).need)
        raises("no cgroup controller for disk", cgroup.Cgroups([]).need)


# ---- what `lab` refuses

def what_a_machine_lacks_is_said_with_status_77():
    need_lab()
    with Lab({"name": "box1"}, up=False) as lab:
        copy = lab.path("copy")
        shutil.copytree(os.path.dirname(LAB), copy)
        for verb in (["up", lab.file], ["down"], ["cold"], ["exec", "box1", "--", "true"], ["set", "box1", "cpu=1"]):
            done = subprocess.run(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/env", "python3",
                                   os.path.join(copy, "lab"), *verb], env={**lab.env, "PATH": "/usr/bin:/bin"},
                                  capture_output=True, text=True, check=False)
            assert done.returncode == 77 and "needs root" in done.stderr and done.stderr.count("\n") == 1, (verb, done)
        tools = lab.path("tools")
        os.mkdir(tools)
        for name in ("ip", "unshare", "nsenter", "sleep", "sh"):
            os.symlink(shutil.which(name), os.path.join(tools, name))
        lab.refused("'tc' is not installed", "up", lab.file, env={"PATH": tools}, status=77)
        no_groups = ["unshare", "--mount", "sh", "-c", 'umount -R -l /sys/fs/cgroup; exec "$@"', "sh"]
        lab.refused("no cgroup controller for disk", "up", lab.file, status=77, prefix=no_groups)
        assert lab.good("down", prefix=no_groups) == "no lab was up\n"
        assert lab.traces() == [], lab.traces()


def a_disk_that_cannot_be_throttled_is_found_out():
    need_lab()
    with Lab({"name": "box1"}, up=False) as lab:
        mounted = {"tmpfs": "mount -t tmpfs none $1",
                   "overlay": "mount -t tmpfs none $1 && mkdir $1/u $1/w $1/m && mount -t overlay -o "
                              "lowerdir=/usr,upperdir=$1/u,workdir=$1/w none $1/m && mount --bind $1/m $1"}
        point = lab.path("point")
        os.mkdir(point)
        file = lab.write("point.json", {"folder": point, "hosts": [{"name": "box1"}]})
        for kind, script in mounted.items():
            mounts = ["unshare", "--mount", "sh", "-c", f'set -e; {script}; shift; exec "$@"', "sh", point]
            lab.refused(f"lies on {kind}", "up", file, prefix=mounts)
        proc = lab.write("proc.json", {"folder": "/proc", "hosts": [{"name": "box1"}]})
        lab.refused("no disk that could be throttled", "up", proc, status=77)
        gone = lab.write("gone.json", {"folder": lab.path("gone"), "hosts": [{"name": "box1"}]})
        lab.refused("is not there", "up", gone)
        assert lab.traces() == [], lab.traces()


def wrong_usage_and_missing_things_get_a_sentence():
    need_lab()
    with Lab({"name": "box1"}, up=False) as lab:
        for arguments in ([], ["fly"], ["up"], ["up", "a", "b"], ["exec", "box1", "true"], ["exec", "box1", "--"], ["down", "x"],
                          ["set", "box1"], ["status", "--yaml"], ["put", "box1"]):
            lab.refused("see 'lab --help'", *arguments, status=2)
        lab.refused("'lab exec HOST -- COMMAND' would be right", "exec", "box1", "--", status=2)
        lab.refused("'lab up FILE.json' would be right", "up", status=2)
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run([sys.executable, LAB, "status", "--json"], env={**lab.env, "PYTHONUNBUFFERED": ""}, stdout=full,
                                  stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 1 and done.stderr == "lab: standard output: No space left on device\n", done
        for arguments in (["exec", "box1", "--", "true"], ["cold"], ["set", "box1", "disk=1MB/s"], ["put", "box1", "/etc/hosts"],
                          ["status"]):
            lab.refused("no lab is up", *arguments)
        assert json.loads(lab.run("status", "--json").stdout) == {"up": False}
        assert lab.good("down") == "no lab was up\n"
        assert "Example:" in lab.good("--help") and "Example:" in lab.good("up", "--help")
        with open(lab.path("sparse"), "wb") as file:
            file.truncate(8 << 40)
        for files, sentence in ((["sparse"], "MiB free"), (["missing"], "cannot be copied"), (["/dev/null"], "no regular file")):
            lab.refused(sentence, "up", lab.write("files.json", {"folder": lab.folder, "hosts": [
                {"name": "box1", "files": files}]}))
        theirs = lab.path(lab.names()[0])
        os.mkdir(theirs)
        lab.write(os.path.join(theirs, "theirs"), "")
        lab.refused("no lab made it", "up", lab.file)
        assert lab.traces() == [theirs] and os.listdir(theirs) == ["theirs"], lab.traces()
        os.mkdir(lab.state)
        lab.write("state/hosts", "")
        for verb in (["up", lab.file], ["down"]):
            lab.refused("something else than a lab's state", *verb)
        assert os.listdir(lab.state) == ["hosts"]


def what_is_wrong_while_a_lab_is_up_gets_a_sentence():
    need_lab()
    with Lab({"name": "box1"}, {"name": "box2"}) as lab:
        lab.refused("a lab is up already (box1, box2)", "up", lab.file)
        lab.refused('no host "box3"; there are box1, box2', "exec", "box3", "--", "true")
        lab.refused("no such command", "exec", "box1", "--", "no-such-command", status=127)
        lab.refused('no host "nas"', "set", "nas", "disk=1MB/s")
        lab.refused("changes nothing", "set", "box1", "speed=1", status=2)
        lab.refused("disk is \"0MB/s\"", "set", "box1", "disk=0MB/s", status=2)
        lab.refused("cpu is \"half\"", "set", "box1", "cpu=half", status=2)
        lab.refused("cannot be copied", "put", "all", lab.path("missing"))
        lab.refused("cannot be opened", "cold", lab.path("missing"))
        lab.refused("no regular file", "cold", lab.folder)
        lab.refused("inside of the lab", "exec", "box1", "--", sys.executable, LAB, "down")
        assert lab.inside("box2", "hostname") == "box2"


# ---- what a host is

def hosts_have_names_links_and_memory_of_their_own():
    need_lab()
    with Lab({"name": "box1", "link": "1Gbit/s"}, {"name": "box2"}) as lab:
        one = lab.host("box1")
        assert lab.inside("box1", "hostname") == "box1"
        assert one["address"] in lab.inside("box2", "getent", "hosts", "box1")
        assert sorted(lab.inside("box1", "ls", "/sys/class/net").split()) == ["eth0", "lo"]
        lab.inside("box1", "sh", "-c", "echo secret >/dev/shm/x")
        assert lab.run("exec", "box2", "--", "cat", "/dev/shm/x").returncode != 0 and not os.path.exists("/dev/shm/x")
        shared = {lab.inside(name, "readlink", f"/proc/self/ns/{kind}")
                  for name in ("box1", "box2") for kind in ("net", "ipc", "uts", "mnt")}
        assert len(shared) == 8 and not shared & {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "uts", "mnt")}
        environment = dict(line.split("=", 1) for line in lab.inside("box1", "env").splitlines() if "=" in line)
        assert set(environment["UCX_TLS"].split(",")) <= {"tcp", "self"} and environment["UCX_NET_DEVICES"] == "eth0"
        assert environment["FIRSTLIGHT_LAB_HOST"] == "box1" and environment["FIRSTLIGHT_LAB_FOLDER"] == one["folder"]
        assert lab.inside("box1", "pwd") == os.getcwd()


def exec_returns_the_status_and_passes_signals_on():
    need_lab()
    with Lab({"name": "box1"}) as lab:
        for status in (0, 7, 77):
            assert lab.run("exec", "box1", "--", "sh", "-c", f"exit {status}").returncode == status
        assert lab.run("exec", "box1", "--", "sh", "-c", "kill -SEGV $$").returncode == -signal.SIGSEGV
        assert lab.inside("box1", "printf", "%s|", "a b", "", "$HOME", "--json") == "a b||$HOME|--json|"
        for number in (signal.SIGTERM, signal.SIGINT):
            process = lab.start("exec", "box1", "--", "sleep", "60")
            wait_until(lambda: lab.host("box1")["pids"] == [process.pid], 20, "the command runs in box1")
            process.send_signal(number)
            assert process.wait(10) == -number
            process.communicate()


def a_mapped_file_is_found_out_with_who_maps_it():
    need_lab()
    with Lab({"name": "box1"}, {"name": "box2"}) as lab:
        source = lab.data("model", 4 * MB)
        lab.good("put", "all", source)
        paths = [lab.model(name, "model") for name in ("box1", "box2")]
        assert len({os.stat(path).st_ino for path in [source, *paths]}) == 3
        for path in paths:
            with open(path, "rb") as file:
                file.read()
        assert residency.resident_bytes(paths[0]) == (4 * MB, 4 * MB)
        with open(source, "rb") as one, open(paths[0], "rb") as two:
            assert one.read() == two.read()
        answer = json.loads(lab.good("cold", "--json"))
        assert answer == {"files": 2, "bytes": 8 * MB, "cold": True, "stayed": []}, answer
        assert [residency.resident_bytes(path)[0] for path in paths] == [0, 0]
        with open(paths[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[2 * MB] >= 0
            done = lab.run("cold")
            assert done.returncode == 1 and f"(pid {os.getpid()})" in done.stderr and paths[1] in done.stderr, done
            assert "maps it" in done.stderr and paths[0] not in done.stderr
            lab.good("cold", paths[0])
        lab.good("cold", paths[1])
        empty = lab.write("empty", "")
        assert "1 file, 0.0 MB" in lab.good("cold", empty)


def seconds_to_read(lab, host, how, path):
    forget(path)
    return float(lab.inside(host, sys.executable, "-c", READ, how, path))


def every_way_to_read_is_throttled():
    need_lab()
    with Lab({"name": "box1"}, {"name": "box2", "disk": "10MB/s"}) as lab:
        lab.good("put", "all", lab.data("model", 20 * MB))
        path = lab.model("box2", "model")
        for how in ("buffered", "direct", "mapped"):
            took = seconds_to_read(lab, "box2", how, path)
            assert took > 1.5, f"{how}: 20 MB at 10 MB/s in {took:.2f} s"
        if shutil.which("fio") is None:
            print("  note: no fio, io_uring is not checked")
        for direct in (0, 1) if shutil.which("fio") else ():
            forget(path)
            out = lab.inside("box2", "fio", "--name=read", "--ioengine=io_uring", f"--direct={direct}", "--iodepth=8", "--bs=256k",
                             "--rw=read", "--readonly", f"--filename={path}", "--output-format=json")
            took = json.loads(out[out.index("{"):])["jobs"][0]["read"]["runtime"] / 1000
            assert took > 1.5, f"io_uring, direct={direct}: 20 MB at 10 MB/s in {took:.2f} s"
        lab.good("set", "box1", "disk=8MB/s")
        assert seconds_to_read(lab, "box1", "buffered", lab.model("box1", "model")) > 1.9
        lab.good("set", "all", "disk=none")
        assert lab.host("box1")["disk_bytes_s"] is None and lab.host("box2")["disk_bytes_s"] is None


def seconds_to_send(lab, source, target, size):
    with lab.start("exec", target, "--", sys.executable, "-c", LISTEN, lab.host(target)["address"]) as listener:
        assert listener.stdout.readline() == "listening\n", listener.stderr.read()
        lab.inside(source, sys.executable, "-c", SEND, target, str(size))
        return float(listener.communicate(timeout=60)[0])


def links_are_throttled_in_both_directions():
    need_lab()
    with Lab({"name": "box1", "link": "10Mbit/s"}, {"name": "box2"}) as lab:
        for source, target in (("box1", "box2"), ("box2", "box1")):
            took = seconds_to_send(lab, source, target, 2 * MB)
            assert took > 1.2, f"{source} to {target}: 2 MB at 10 Mbit/s in {took:.2f} s"
        lab.good("set", "box1", "link=none")
        lab.good("set", "box2", "link=8Mbit/s")
        assert "tbf" not in lab.inside("box1", "tc", "qdisc")
        assert seconds_to_send(lab, "box1", "box2", 2 * MB) > 1.5
        assert lab.host("box1")["link_bits_s"] is None and lab.host("box2")["link_bits_s"] == 8 * MB


def memory_and_processor_are_limited():
    need_lab()
    with Lab({"name": "box1", "memory": "64MiB", "cpu": 0.1}) as lab:
        burn = "import time\nstart, used = time.monotonic(), time.process_time()\n" \
               "while time.process_time() < used + 0.2: pass\nprint(time.monotonic() - start)"
        took = float(lab.inside("box1", sys.executable, "-c", burn))
        assert took > 1, f"0.2 s of work on a tenth of a core took {took:.2f} s"
        lab.good("set", "box1", "cpu=none")
        done = lab.run("exec", "box1", "--", sys.executable, "-c", "bytearray(b'x') * (256 << 20)")
        assert done.returncode == -signal.SIGKILL, done
        assert lab.host("box1")["up"], "the host's keeper survives a process that wants too much"
        lab.good("set", "box1", "memory=none")
        lab.inside("box1", sys.executable, "-c", "bytearray(b'x') * (256 << 20)")


# ---- clusters in it

def mpirun_reaches_hosts_through_the_agent():
    need_lab()
    if shutil.which("mpirun") is None:
        raise Skip("mpirun is not installed")
    probe = cluster.program("mpi_probe")
    root = ["--allow-run-as-root", "--mca", "plm_rsh_agent", AGENT]
    line = ["mpirun", *root, "-np", "1", "-H", "box1", probe, "coordinator", ":", "-np", "2", "-H", "box2,box3", probe, "node"]
    with Lab({"name": "box1"}, {"name": "box2", "link": "1Gbit/s"}, {"name": "box3"}) as lab:
        out = lab.inside("box1", "mpirun", *root, "-H", "box1,box2", "hostname")
        assert sorted(out.split()) == ["box1", "box2"], out
        met = lab.inside("box1", *line)
        assert met.count("of 3: up 2, received 2") == 3, met
        from_outside = subprocess.run(line, env=lab.env, capture_output=True, text=True, timeout=60, check=False)
        assert from_outside.stdout.count("of 3: up 2, received 2") == 3, from_outside
        done = subprocess.run([AGENT, "box9", "true"], env=lab.env, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "no host 'box9'" in done.stderr, done
        assert subprocess.run([AGENT, "box2", "test", "$(hostname)", "=", "box2"], env=lab.env, check=False).returncode == 0


def a_pool_of_hosts_answers_a_prompt():
    need_lab()
    cluster.need_model(cluster.SMOLLM2)
    model = os.path.join(cluster.MODELS, cluster.SMOLLM2 + ".gguf")
    with Lab({"name": "nas", "link": "1Gbit/s", "files": [model]}, {"name": "box1"}, {"name": "box2"}) as lab:
        key = lab.path("key")
        subprocess.run([cluster.program("firstlight"), "keygen", "--out", key], check=True, capture_output=True)
        nas = lab.host("nas")
        socket = "unix:" + os.path.join(nas["folder"], "client.sock")
        env = {**lab.env, "FIRSTLIGHT_ADDR": socket}

        def firstlight(*arguments):
            done = subprocess.run([cluster.program("firstlight"), *arguments], env=env, capture_output=True, text=True,
                                  timeout=60, check=False)
            return json.loads(done.stdout) if done.returncode == 0 else {}

        started = [lab.start("exec", "nas", "--", cluster.program("firstlight-coordinator"), "--listen", nas["address"] + ":7412",
                             "--client-listen", socket, "--models", os.path.join(nas["folder"], "models"), "--key-file", key)]
        started += [lab.start("exec", name, "--", cluster.program("firstlight-node"), "--join", "nas:7412", "--name", name,
                              "--threads", "1", "--listen", lab.host(name)["address"] + ":7413", "--key-file", key)
                    for name in ("box1", "box2")]
        try:
            wait_until(lambda: sum(node["state"] != "lost" for node in firstlight("status", "--json").get("nodes", [])) == 2, 30,
                       "both boxes joined")
            answer = firstlight("generate", "--model", cluster.SMOLLM2, "--tokens", "1,2,3,4", "--max-tokens", "4", "--json")
            assert len(answer["tokens"]) == 4 and {stage["node"] for stage in answer["stages"]} == {"box1", "box2"}, answer
            cached = [os.path.join(folder, name) for box in ("box1", "box2")
                      for folder, _, names in os.walk(os.path.join(lab.host(box)["folder"], "cache")) for name in names]
            assert cached, "the boxes keep what they fetched in their own caches"
        except BaseException:
            for process in started:
                process.kill()
                print(process.communicate()[1][-2000:])
            raise
        lab.good("down")
        assert [process.wait(10) for process in started] == [-signal.SIGKILL] * 3
        for process in started:
            process.communicate()
        assert lab.traces() == [], lab.traces()


if __name__ == "__main__":
    cluster.main([
        a_lab_file_of_nonsense_is_refused_with_a_sentence, a_lab_file_says_what_it_means,
        an_amount_is_written_as_short_as_it_can_be, a_partition_is_traced_to_its_disk,
        both_versions_of_control_groups_get_what_they_understand, what_a_machine_lacks_is_said_with_status_77,
        a_disk_that_cannot_be_throttled_is_found_out, wrong_usage_and_missing_things_get_a_sentence,
        what_is_wrong_while_a_lab_is_up_gets_a_sentence, hosts_have_names_links_and_memory_of_their_own,
        exec_returns_the_status_and_passes_signals_on, a_mapped_file_is_found_out_with_who_maps_it,
        every_way_to_read_is_throttled, links_are_throttled_in_both_directions,
        memory_and_processor_are_limited, mpirun_reaches_hosts_through_the_agent,
        a_pool_of_hosts_answers_a_prompt])
