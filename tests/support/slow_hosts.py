"""A lab of slow hosts for tests: each has its own state and folder, and is down when its block ends.

Importing this makes the modules of cluster/lab importable, too.
"""
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

from pool import ROOT, Skip, wait_until

sys.path.insert(0, os.path.join(ROOT, "cluster", "lab"))
sys.dont_write_bytecode = True
import cgroup
import residency
import state
from hosts_file import LabError

LAB = os.path.join(ROOT, "cluster", "lab", "lab")
AGENT = os.path.join(ROOT, "cluster", "lab", "agent")
MB = 10**6

# A socket copy: ADDRESS listens and prints the seconds from first byte to last; ADDRESS SIZE sends.
LISTEN = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7001)) as server:
    print("listening", flush=True)
    link, _ = server.accept()
    block, start = link.recv(1), time.monotonic()
    while block:
        block = link.recv(1 << 18)
    print(time.monotonic() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7001)) as link:
    link.sendall(bytes(int(sys.argv[2])))
"""


class Lab:
    """A lab of its own state and folder; `hosts` as in a lab file."""

    def __init__(self, *hosts, up=True, **more):
        self.folder = tempfile.mkdtemp(prefix="firstlight-test-lab.", dir="/var/tmp")
        os.chmod(self.folder, 0o755)
        self.state = os.path.join(self.folder, "state")
        self.env = {**os.environ, "FIRSTLIGHT_LAB_STATE": self.state}
        self.file = self.write("lab.json", {"folder": self.folder, "hosts": list(hosts), **more})
        if up:
            try:
                done = self.run("up", self.file)
                assert done.returncode == 0, done.stderr
            except BaseException:
                self.close()
                raise

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(content if isinstance(content, str) else json.dumps(content))
        return self.path(name)

    def data(self, name, size):
        with open(self.path(name), "wb") as file:
            file.write(os.urandom(size))
        return self.path(name)

    def run(self, *arguments, env=None, timeout=120, prefix=()):
        return subprocess.run([*prefix, sys.executable, LAB, *arguments], env={**self.env, **(env or {})}, timeout=timeout,
                              capture_output=True, text=True, check=False)

    def start(self, *arguments, **how):
        return subprocess.Popen([sys.executable, LAB, *arguments], env=self.env, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, **how)

    def good(self, *arguments, **how):
        done = self.run(*arguments, **how)
        assert done.returncode == 0, f"{arguments} exited {done.returncode}: {done.stderr}"
        return done.stdout

    def refused(self, sentence, *arguments, status=1, **how):
        """A sentence on one line, this exit status, and no trace."""
        done = self.run(*arguments, **how)
        assert done.returncode == status, f"{arguments} exited {done.returncode}: {done.stdout}{done.stderr}"
        assert done.stderr.startswith("lab: ") and done.stderr.count("\n") == 1, done.stderr
        assert sentence in done.stderr, f"no \"{sentence}\" in: {done.stderr}"

    def inside(self, host, *command):
        return self.good("exec", host, "--", *command).strip()

    def host(self, name):
        return next(host for host in json.loads(self.good("status", "--json"))["hosts"] if host["name"] == name)

    def model(self, host, name):
        return os.path.join(self.host(host)["folder"], "models", name)

    def names(self):
        lab_id = state.identity(os.path.realpath(self.state))
        return f"firstlight-lab-{lab_id}", f"fllab-{lab_id}"

    def traces(self):
        """All that is left of this lab: groups, links, folders, mounts, processes."""
        group, link = self.names()
        found = [path for root in cgroup.Cgroups().roots() if os.path.isdir(path := os.path.join(root, group))]
        found += [path for path in (f"/sys/class/net/{link}", self.state, self.path(group)) if os.path.exists(path)]
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            found += [line for line in lines if self.state in line]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/cgroup", encoding="ascii") as groups:
                    if group in groups.read():
                        found.append(f"process {pid} in {group}")
                with open(f"/proc/{pid}/environ", "rb") as environment:
                    if f"FIRSTLIGHT_LAB_STATE={self.state}".encode() in environment.read() and int(pid) != os.getpid():
                        found.append(f"process {pid}")
        return found

    def close(self):
        self.run("down")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.close()


def need_lab():
    if os.geteuid() != 0:
        raise Skip("not root; a lab needs namespaces and control groups")
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            raise Skip(f"no {tool}")
    try:
        cgroup.Cgroups().need()
    except LabError as reason:
        raise Skip(str(reason)) from None
    made = subprocess.run(["unshare", "--net", "--mount", "--uts", "--ipc", "--propagation", "slave", "true"], text=True,
                          capture_output=True, check=False)
    if made.returncode != 0:
        raise Skip(f"namespaces cannot be made here: {made.stderr.strip()}")


def forget(path):
    """As `lab cold`, for one file: the interpreter that reads it next need not come from the throttled disk."""
    wait_until(lambda: residency.forget(path) or residency.resident_bytes(path)[0] == 0, 10, f"{path} is cold")
