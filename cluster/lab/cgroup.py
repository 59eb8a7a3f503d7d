"""cgroup - the limits of hosts: disk reads, memory, processor.

A host is one control group in every hierarchy that holds a controller the lab
needs.  Version 1 has a hierarchy per controller (blkio, memory, cpu), version
2 one for all (io, memory, cpu), and a machine may mix them: each controller is
looked for on its own, version 1 first, since a controller is only ever in one.

Whatever runs in a host is in its groups, so the groups are also how `lab down`
finds what to end, when nothing else is left that remembers.
"""
import errno
import os
import signal
import time

import disk
from hosts_file import LabError

# Short periods: a host with half a core is half as fast at every moment, not asleep for 50 ms.
CPU_PERIOD_US = 10000
CPU_QUOTA_MIN_US = 1000
# A group counts as one process against those outside, however many it holds: a neighbour's work would be measured.
# 100 times the usual weight is the most that version 2 allows.
FIRST = {1: ("cpu.shares", "102400"), 2: ("cpu.weight", "10000")}
WANTED = (("disk", "blkio", "io"), ("memory", "memory", "memory"), ("cpu", "cpu", "cpu"))


def put(path, text):
    """Write to a file of the kernel; without O_CREAT, which it answers with the wrong error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def words(path):
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []


class Cgroups:
    """Where each controller is: {"disk": (1 or 2, mount point), ..}."""

    def __init__(self, mounts=None):
        v1, v2 = {}, None
        for _, _, point, kind, _, options in mounts if mounts is not None else disk.mounts():
            if kind == "cgroup":
                v1.update({option: point for option in options})
            elif kind == "cgroup2":
                v2 = v2 or point
        offered = words(os.path.join(v2, "cgroup.controllers")) if v2 else []
        self.places, self.v2 = {}, v2
        for what, old, new in WANTED:
            if old in v1:
                self.places[what] = (1, v1[old])
            elif new in offered:
                self.places[what] = (2, v2)

    def need(self):
        for what, old, new in WANTED:
            if what not in self.places:
                raise LabError(f"this machine has no cgroup controller for {what} ('{old}' of version 1, '{new}' of "
                               "version 2); mount one, or boot a kernel that has it", 77)

    def roots(self):
        return sorted({place for _, place in self.places.values()})

    def parents(self, lab):
        return [os.path.join(root, lab) for root in self.roots()]

    def groups(self, lab, name):
        """The folders of one host's groups, one per hierarchy."""
        return [os.path.join(parent, name) for parent in self.parents(lab)]

    def lend_controllers(self, lab):
        """Version 2 hands controllers down one level at a time.  What the root had not handed down is returned."""
        wanted = [new for what, _, new in WANTED if self.places[what][0] == 2]
        if not wanted:
            return []
        had = words(os.path.join(self.v2, "cgroup.subtree_control"))
        more = [name for name in wanted if name not in had]
        for folder, names in ((self.v2, more), (os.path.join(self.v2, lab), wanted)):
            try:
                if names:
                    put(os.path.join(folder, "cgroup.subtree_control"), " ".join("+" + name for name in names))
            except OSError as error:
                raise LabError(f"{folder} does not hand down the controllers {', '.join(names)}: {error.strerror}; run "
                               "the lab outside of a container", 77) from None
        return more

    def take_back(self, names):
        for name in names:
            try:
                put(os.path.join(self.v2, "cgroup.subtree_control"), "-" + name)
            except OSError:
                pass  # somebody else relies on it by now

    def make(self, lab, name):
        for folder in self.groups(lab, name):
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise LabError(f"the control group {folder} cannot be made: {error.strerror}", 77) from None

    def limit(self, lab, name, what, value, device=None):
        """Set one limit; None lifts it."""
        version, root = self.places[what]
        folder = os.path.join(root, lab, name)
        try:
            for file, text in SETTINGS[what, version](value, device):
                try:
                    put(os.path.join(folder, file), text)
                except FileNotFoundError:
                    if file not in OPTIONAL:
                        raise
        except OSError as error:
            raise LabError(f"{name}: the kernel refuses {what} {value}{' on device ' + device if device else ''}: "
                           f"{error.strerror}") from None

    def go_first(self, lab):
        """The lab's processes go before all others of the machine."""
        version, root = self.places["cpu"]
        name, weight = FIRST[version]
        try:
            put(os.path.join(root, lab, name), weight)
        except OSError as error:
            raise LabError(f"the lab cannot be given the processor first: {error.strerror}") from None

    def pids(self, lab):
        """Every process in any group of the lab."""
        found = set()
        for parent in self.parents(lab):
            for folder, _, _ in os.walk(parent):
                found.update(int(pid) for pid in words(os.path.join(folder, "cgroup.procs")))
        return found - {0}  # 0 is a process that this namespace cannot name

    def lift_disks(self, lab):
        """A process that waits for a throttled read ends only after it: nobody may wait long."""
        version, root = self.places.get("disk", (1, ""))
        parent = os.path.join(root, lab)
        for name in os.listdir(parent) if root and os.path.isdir(parent) else []:
            for word in words(os.path.join(parent, name, DISK_FILE[version])):
                try:
                    if ":" in word:
                        self.limit(lab, name, "disk", None, word)
                except LabError:
                    pass  # the disk itself is gone

    def remove(self, lab, end_all, seconds=10):
        """Remove every group of the lab. end_all() ends a process that has come in since."""
        deadline = time.monotonic() + seconds
        for parent in self.parents(lab):
            for folder, _, _ in os.walk(parent, topdown=False):
                empty_memory(folder)
                while os.path.isdir(folder):
                    try:
                        os.rmdir(folder)
                    except OSError as error:
                        if error.errno != errno.EBUSY or time.monotonic() > deadline:
                            raise LabError(f"the control group {folder} cannot be removed: {error.strerror}") from None
                        end_all()
                        time.sleep(0.01)


def empty_memory(folder):
    """Version 1 keeps a removed group alive as long as page cache is charged to it."""
    try:
        put(os.path.join(folder, "memory.force_empty"), "0")
    except OSError:
        pass


def end(find, seconds=20):
    """Kill what find() finds until it finds nothing; processes may still be starting others."""
    deadline = time.monotonic() + seconds
    while True:
        left = find()
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"these processes do not end: {', '.join(map(str, sorted(left)))}; run 'lab down' again")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def cpu_quota(cores):
    period = max(CPU_PERIOD_US, round(CPU_QUOTA_MIN_US / cores))
    return round(cores * period), period


def cpu_v1(cores, _):
    if cores is None:
        return [("cpu.cfs_quota_us", "-1")]
    quota, period = cpu_quota(cores)
    # The quota of a longer period may be too much for a shorter one: lift, then set.
    return [("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", str(period)), ("cpu.cfs_quota_us", str(quota))]


def cpu_v2(cores, _):
    if cores is None:
        return [("cpu.max", "max")]
    return [("cpu.max", "{} {}".format(*cpu_quota(cores)))]


# Swap would let a host have more memory than it has.  Not every kernel counts it.
OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max")
DISK_FILE = {1: "blkio.throttle.read_bps_device", 2: "io.max"}
SETTINGS = {
    ("disk", 1): lambda rate, device: [(DISK_FILE[1], f"{device} {rate or 0}")],
    ("disk", 2): lambda rate, device: [(DISK_FILE[2], f"{device} rbps={rate or 'max'}")],
    ("memory", 1): lambda size, _: (
        [("memory.memsw.limit_in_bytes", "-1"), ("memory.limit_in_bytes", str(size or -1))] +
        ([("memory.memsw.limit_in_bytes", str(size))] if size else [])),
    ("memory", 2): lambda size, _: [("memory.max", str(size or "max")), ("memory.swap.max", "0" if size else "max")],
    ("cpu", 1): cpu_v1,
    ("cpu", 2): cpu_v2,
}
