"""disk - which block device holds a folder, and whether its reads can be throttled.

The kernel throttles whole disks: a partition is traced to its disk.  Overlay
and memory file systems have no device of their own, reads from them would
pass every limit unseen, so they are refused by name.
"""
import os

from hosts_file import LabError

NO_DISK = {"overlay": "an overlay, as containers have", "tmpfs": "a file system in memory",
           "ramfs": "a file system in memory", "zfs": "ZFS, which hides its disks from the kernel's limits",
           "nfs": "another machine's disk", "nfs4": "another machine's disk", "cifs": "another machine's disk",
           "9p": "another machine's disk", "virtiofs": "another machine's disk", "fuse": "a program's"}


def unescape(text):
    """mountinfo writes blanks and backslashes as octal numbers."""
    return text.encode("latin-1").decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")


def mounts(mountinfo="/proc/self/mountinfo"):
    """(device "8:1", root, mount point, type, source, options of the file system), in mount order."""
    with open(mountinfo, encoding="latin-1") as lines:
        for line in lines:
            left, _, right = line.rstrip("\n").partition(" - ")
            fields, tail = left.split(" "), right.split(" ")
            yield fields[2], unescape(fields[3]), unescape(fields[4]), tail[0], unescape(tail[1]), tail[2].split(",")


def mount_of(folder):
    """The mount that a folder lies on: the last one mounted at the longest prefix."""
    path = os.path.realpath(folder)
    best = None
    for mount in mounts():
        point = mount[2]
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best[2])):
            best = mount
    return best


def device_number(folder, mount):
    """ "MAJOR:MINOR" of the device under a file system; btrfs only tells it through its source."""
    if mount is None:  # a changed root, whose mount cannot be seen
        number = os.stat(folder).st_dev
        return f"{os.major(number)}:{os.minor(number)}"
    if not mount[0].startswith("0:"):
        return mount[0]
    try:
        number = os.stat(mount[4]).st_rdev if mount[4].startswith("/dev/") else 0
    except OSError:
        number = 0
    if number == 0:
        raise LabError(f"{folder} lies on {mount[3]}, which has no disk that could be throttled; "
                       "a folder on ext4 or xfs, named as \"folder\", would be right", 77)
    return f"{os.major(number)}:{os.minor(number)}"


def whole_disk(number, devices="/sys/dev/block"):
    """ "MAJOR:MINOR" of the disk of a partition, or of the disk itself, and its folder in /sys."""
    place = os.path.realpath(os.path.join(devices, number))
    if os.path.exists(os.path.join(place, "partition")):
        place = os.path.dirname(place)
        with open(os.path.join(place, "dev"), encoding="ascii") as file:
            number = file.read().strip()
    return number, place


def throttleable(folder):
    """ {"number", "name", "file_system", "read_ahead_kb"} of the disk under a folder that is there."""
    mount = mount_of(folder)
    kind = mount[3] if mount else "unknown"
    family = kind.split(".")[0]
    if family in NO_DISK:
        raise LabError(f"{folder} lies on {kind}, {NO_DISK[family]}: its reads cannot be throttled; "
                       "a folder on ext4 or xfs, named as \"folder\", would be right")
    number, place = whole_disk(device_number(folder, mount))
    if not os.path.isdir(os.path.join(place, "queue")):
        raise LabError(f"{folder} lies on device {number}, which is no disk whose reads can be throttled; "
                       "a folder on another disk, named as \"folder\", would be right")
    with open(os.path.join(place, "queue", "read_ahead_kb"), encoding="ascii") as file:
        ahead = int(file.read())
    return {"number": number, "name": os.path.basename(place), "file_system": kind, "read_ahead_kb": ahead}
