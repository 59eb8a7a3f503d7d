#!/usr/bin/env python3
"""The lab of slow hosts leaves nothing: no namespace, link, control group, process or folder.

Not after `lab down`, nor after something was killed or interrupted at any moment.
Needs root, tc and control groups, and skips with the reason where one is missing.
"""
import json
import os
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool as cluster
from pool import wait_until
from slow_hosts import MB, Lab, forget, need_lab
import cgroup


def alive(pid):
    """Whether a process is there and more than a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_sign(sign, process):
    """Until a file is there: a copy may be done, and have its final name, by the time one looks."""
    deadline = time.monotonic() + 60
    while not os.path.exists(sign) and not os.path.exists(sign.removesuffix(".part")):
        assert process.poll() is None and time.monotonic() < deadline, (sign, process.communicate())


def down_ends_even_what_hides():
    need_lab()
    with Lab({"name": "box1", "disk": "400kB/s"}, {"name": "box2"}) as lab:
        lab.good("put", "all", lab.data("model", 24 * MB))
        path = lab.model("box1", "model")
        forget(path)
        machine = [os.path.join(root, "cgroup.procs") for root in cgroup.Cgroups().roots()]
        leave_group = " ".join(f"echo $$ >{place};" for place in machine)
        daemons = [lab.start("exec", "box1", "--", "setsid", "sleep", "300"),
                   lab.start("exec", "box1", "--", "sh", "-c", f"{leave_group} exec sleep 301"),
                   lab.start("exec", "box2", "--", "nsenter", f"--net=/proc/{os.getpid()}/ns/net", "sleep", "302"),
                   # A read that takes more than a minute at that rate.
                   lab.start("exec", "box1", "--", "dd", f"if={path}", "of=/dev/null", "iflag=direct", "bs=4M")]
        wait_until(lambda: len(lab.host("box1")["pids"]) == 2 and len(lab.host("box2")["pids"]) == 1, 20, "three daemons")
        lab.good("down")
        assert [process.wait(5) for process in daemons] == [-signal.SIGKILL] * 4
        for process in daemons:
            process.communicate()
        assert lab.traces() == [], lab.traces()


def a_killed_up_is_cleared_away_by_down():
    need_lab()
    with Lab({"name": "box1", "files": ["model"]}, {"name": "box2", "files": ["model"]}, up=False) as lab:
        lab.data("model", 64 * MB)
        group, link = lab.names()
        moments = {"the state is there": lab.path("state/state.json"), "the folder is there": lab.path(group),
                   "the groups are there": os.path.join(cgroup.Cgroups().roots()[0], group, "box1"),
                   "a host's names are there": lab.path("state/hosts/box1/hosts"), "the link is there": f"/sys/class/net/{link}",
                   "files are being copied": lab.path(f"{group}/box1/models/model.part")}
        for moment, sign in moments.items():
            process = lab.start("up", lab.file, start_new_session=True)
            wait_for_sign(sign, process)
            process.kill()
            process.wait()
            assert lab.run("exec", "box1", "--", "true").returncode == 1
            lab.good("down")
            process.communicate()
            assert lab.traces() == [], (moment, lab.traces())
        lab.good("up", lab.file)
        assert lab.inside("box2", "hostname") == "box2"


def a_killed_down_is_finished_by_the_next():
    need_lab()
    with Lab({"name": "box1"}, {"name": "box2"}, up=False) as lab:
        group, link = lab.names()
        root = cgroup.Cgroups().roots()[0]
        for gone in (f"/sys/class/net/{link}", os.path.join(root, group, "box1"), os.path.join(root, group),
                     lab.path(f"{group}/box1"), lab.path("state/hosts")):
            lab.good("up", lab.file)
            process = lab.start("down")
            deadline = time.monotonic() + 30
            while os.path.exists(gone):
                assert time.monotonic() < deadline, (gone, process.poll())
            process.kill()
            process.communicate()
            lab.good("down")
            assert lab.traces() == [], (gone, lab.traces())


def an_interrupted_up_leaves_nothing():
    need_lab()
    with Lab({"name": "box1", "files": ["model"]}, {"name": "box2", "files": ["model"]}, up=False) as lab:
        lab.data("model", 64 * MB)
        group, link = lab.names()
        for number, sign in ((signal.SIGINT, f"/sys/class/net/{link}"), (signal.SIGTERM, lab.path(f"{group}/box1/models/model.part")),
                             (signal.SIGHUP, lab.path(group))):
            process = lab.start("up", lab.file, start_new_session=True)
            wait_for_sign(sign, process)
            os.killpg(process.pid, number)
            _, said = process.communicate(timeout=30)
            assert process.returncode == 128 + number and "interrupted" in said, (process.returncode, said)
            assert lab.traces() == [], lab.traces()


def a_killed_keeper_or_runner_is_told_and_cleared_away():
    need_lab()
    with Lab({"name": "box1"}, {"name": "box2"}) as lab:
        with open(lab.path("state/state.json"), encoding="utf-8") as file:
            keepers = {host["name"]: host["keeper"] for host in json.load(file)["hosts"]}
        runner = lab.start("exec", "box2", "--", "sh", "-c", "sleep 300 & echo $!; wait")
        child = int(runner.stdout.readline())
        runner.kill()
        runner.wait()
        assert alive(child) and child in lab.host("box2")["pids"]
        os.kill(keepers["box1"], signal.SIGKILL)
        wait_until(lambda: not lab.host("box1")["up"], 10, "status tells that box1 is gone")
        assert "gone" in lab.good("status")
        done = lab.run("exec", "box1", "--", "true")
        assert done.returncode == 125 and "the host box1 is gone" in done.stderr, done
        assert lab.inside("box2", "hostname") == "box2"
        lab.good("down")
        runner.communicate()
        assert not alive(child) and lab.traces() == [], lab.traces()


def down_works_with_a_state_that_makes_no_sense():
    need_lab()
    with Lab({"name": "box1"}) as lab:
        lab.write("state/state.json", "{")
        lab.refused("left unfinished", "status")
        lab.refused("a lab is up already (left unfinished)", "up", lab.file)
        lab.good("down")
        group, _ = lab.names()
        assert lab.traces() == [lab.path(group)], lab.traces()
        # Only its folder was unknown; the next lab there takes it over.
        lab.good("up", lab.file)
        shutil.rmtree(lab.state)
        lab.refused("whose state was removed", "up", lab.file)
        lab.good("down")
        lab.good("up", lab.file)
        lab.good("down")
        assert lab.traces() == [], lab.traces()


if __name__ == "__main__":
    cluster.main([
        down_ends_even_what_hides, a_killed_up_is_cleared_away_by_down, a_killed_down_is_finished_by_the_next,
        an_interrupted_up_leaves_nothing, a_killed_keeper_or_runner_is_told_and_cleared_away, down_works_with_a_state_that_makes_no_sense])
