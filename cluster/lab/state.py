"""state - what a lab made, written down before it is made.

A folder, /run/firstlight-lab or $FIRSTLIGHT_LAB_STATE, holds state.json and,
for each host, the script that enters it.  The folder is also the lock.  Names
of control groups, of the link to this machine and of the hosts' folder follow
from the folder's path, so that `lab down` finds them even if whoever made them
was killed half-way, or state.json is gone.
"""
import fcntl
import hashlib
import json
import os
import shutil
import time

from hosts_file import LabError

DEFAULT = "/run/firstlight-lab"
MARK = ".firstlight-lab"  # in a folder that a lab made, and may remove


def folder():
    return os.path.realpath(os.environ.get("FIRSTLIGHT_LAB_STATE") or DEFAULT)


def identity(path):
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:6]


def mark(path):
    """Declare an empty folder, there or not yet, to be a lab's; False when something else is in it."""
    os.makedirs(path, mode=0o755, exist_ok=True)
    if os.path.exists(os.path.join(path, MARK)):
        return True
    if os.listdir(path):
        return False
    with open(os.path.join(path, MARK), "w", encoding="ascii"):
        return True


def remove_marked(path):
    """Remove a folder with the mark, which goes last: whoever was killed meanwhile can go on. Others are left alone."""
    if os.path.exists(os.path.join(path, MARK)):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != MARK:
                os.unlink(entry.path)
        os.unlink(os.path.join(path, MARK))
    try:
        os.rmdir(path)
    except OSError:
        pass  # somebody else's


class State:
    """The state of the one lab that this folder can hold.  Use as a context: locked inside."""

    def __init__(self, wait_seconds=0):
        self.path = folder()
        self.lab = f"firstlight-lab-{identity(self.path)}"
        self.uplink = f"fllab-{identity(self.path)}"
        self.wait_seconds, self.descriptor = wait_seconds, None

    def __enter__(self):
        deadline = time.monotonic() + self.wait_seconds
        while not self.lock():
            if time.monotonic() > deadline:
                raise LabError(f"another lab command is at work with {self.path}; try again when it is done")
            time.sleep(0.05)
        return self

    def __exit__(self, kind, value, trace):
        # A folder that never got a state says nothing: leave no trace of having looked.
        if self.descriptor is not None:
            if not os.path.exists(self.file()):
                self.forget()
            os.close(self.descriptor)
            self.descriptor = None

    def lock(self):
        """The folder's lock; False while somebody else has it.  A `lab down` may remove the folder meanwhile."""
        try:
            os.makedirs(self.path, mode=0o755, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise LabError(f"the state folder {self.path} cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine, now = os.fstat(descriptor), os.stat(self.path)
            if (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino):
                if not mark(self.path):
                    os.close(descriptor)
                    raise LabError(f"{self.path} holds something else than a lab's state; a folder that is not there yet, "
                                   "named by FIRSTLIGHT_LAB_STATE, would be right")
                self.descriptor = descriptor
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return False

    def file(self):
        return os.path.join(self.path, "state.json")

    def host_folder(self, name):
        return os.path.join(self.path, "hosts", name)

    def enter_script(self, name):
        return os.path.join(self.host_folder(name), "enter")

    def read(self):
        """What state.json says; None when there is none, {} when it makes no sense."""
        try:
            with open(self.file(), encoding="utf-8") as file:
                thing = json.load(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return thing if isinstance(thing, dict) and isinstance(thing.get("hosts"), list) else {}

    def need_up(self):
        """What state.json says of a lab that is up."""
        thing = self.read()
        if thing is None:
            raise LabError("no lab is up; 'lab up FILE.json' starts one")
        if thing.get("phase") != "up":
            raise LabError("a lab was left unfinished; 'lab down' clears it away")
        return thing

    def write(self, thing):
        part = self.file() + ".part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump(thing, file, indent=1)
        os.rename(part, self.file())

    def forget(self):
        remove_marked(self.path)


def find_host(thing, name):
    for host in thing["hosts"]:
        if host["name"] == name:
            return host
    names = ", ".join(host["name"] for host in thing["hosts"])
    raise LabError(f"there is no host \"{name[:40]}\"; there are {names}")
