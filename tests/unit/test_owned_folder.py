#!/usr/bin/env python3
"""Folders of killed processes go with the next one; those of the living, and of others, stay."""
import os
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool
from owned_folder import OwnedFolder

PREFIX = "firstlight-owned."
OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from owned_folder import OwnedFolder
folder = OwnedFolder(sys.argv[2])
open(folder.path + "/file", "w").close()
print(folder.path, flush=True)
sys.stdin.read()
folder.close()
"""


class Owner:
    """A process that has a folder until it is closed, or killed."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", OWNER, os.path.dirname(pool.__file__), PREFIX], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.path = self.process.stdout.readline().strip()
        assert os.listdir(self.path) == ["file"], self.path

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def who_ends_takes_the_folder_along():
    with Owner() as owner:
        pass
    assert owner.process.returncode == 0 and not os.path.exists(owner.path), owner.path


def a_killed_owners_folder_goes_with_the_next():
    with Owner() as owner:
        owner.kill()
        assert os.path.isdir(owner.path), "nobody is there to remove it"
        folder = OwnedFolder(PREFIX)
        assert not os.path.exists(owner.path), owner.path
        folder.close()
        assert not os.path.exists(folder.path)


def the_folder_of_the_living_stays():
    with Owner() as one, Owner() as two:
        folder = OwnedFolder(PREFIX)
        assert len({one.path, two.path, folder.path}) == 3 and os.path.exists(one.path) and os.path.exists(two.path)
        folder.close()
        assert os.path.exists(os.path.join(one.path, "file")) and os.path.exists(os.path.join(two.path, "file"))


def what_is_no_folder_of_ours_stays():
    top = tempfile.gettempdir()
    elsewhere = os.path.join(top, "elsewhere")
    os.makedirs(os.path.join(elsewhere, "deep"))
    os.symlink(elsewhere, os.path.join(top, PREFIX + "link"))
    with open(os.path.join(top, PREFIX + "file"), "w", encoding="ascii"):
        pass
    there = sorted(os.listdir(top))
    if os.geteuid() == 0:
        os.mkdir(os.path.join(top, PREFIX + "theirs"))
        os.chown(os.path.join(top, PREFIX + "theirs"), 65534, 65534)
        there = sorted([*there, PREFIX + "theirs"])
    OwnedFolder(PREFIX).close()
    assert sorted(os.listdir(top)) == there and os.listdir(elsewhere) == ["deep"], os.listdir(top)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        pool.main([who_ends_takes_the_folder_along, a_killed_owners_folder_goes_with_the_next, the_folder_of_the_living_stays,
                   what_is_no_folder_of_ours_stays])
