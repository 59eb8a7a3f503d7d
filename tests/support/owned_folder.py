"""Temporary folders that go with the process that made them.

A folder is removed when its owner closes it, and when the owner was killed, by the next one that is made with the same
prefix. Who is alive holds a lock on its folder, which the kernel lets go of however the process ends.
"""
import fcntl
import os
import shutil
import tempfile


def locked(path):
    """A descriptor of the folder with its lock; None when somebody else has it, or it is no folder of ours, or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # no child gets it
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine, now = os.fstat(descriptor), os.stat(path)
        if (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino) and mine.st_uid == os.geteuid():
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def remove_orphans(prefix):
    """The folders whose owners are gone."""
    top = tempfile.gettempdir()
    for name in os.listdir(top):
        if name.startswith(prefix) and (descriptor := locked(os.path.join(top, name))) is not None:
            shutil.rmtree(os.path.join(top, name), ignore_errors=True)
            os.close(descriptor)


class OwnedFolder:
    def __init__(self, prefix):
        remove_orphans(prefix)
        self.descriptor = None
        while self.descriptor is None:  # somebody may take a new one for an orphan
            self.path = tempfile.mkdtemp(prefix=prefix)
            self.descriptor = locked(self.path)

    def close(self):
        """Any number of times."""
        if self.descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.descriptor)
            self.descriptor = None
