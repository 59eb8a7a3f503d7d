"""hosts_file - what a lab file says: hosts, and how slow each of them is.

  {"folder": "/var/tmp",
   "hosts": [{"name": "box1", "disk": "100MB/s", "link": "1Gbit/s", "memory": "8GiB", "cpu": 0.5,
              "files": ["model.gguf"]}]}

Only `hosts` and each host's `name` must be there; what is left out is not
limited.  A file comes from outside: every name, number and count is checked
here, once, and trusted afterwards.

Units: 1 kB = 1000 bytes, 1 KiB = 1024 bytes; links are in bits.
"""
import json
import os
import re
from dataclasses import dataclass, field

FILE_BYTES_MAX = 1 << 20
HOSTS_MAX = 64
FILES_MAX = 256
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,29}[a-z0-9])?")
# "all" stands for every host, "lab" is the machine itself as the hosts see it.
NAMES_TAKEN = ("all", "lab", "localhost")
HOST_KEYS = ("name", "disk", "link", "memory", "cpu", "files")

QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)(/s)?")
BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
BITS = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
DISK = (64 * 10**3, 100 * 10**9)
LINK = (64 * 10**3, 100 * 10**9)
MEMORY = (16 << 20, 16 << 40)
CPU = (0.05, 1024.0)


class LabError(Exception):
    """A sentence for the user, and the exit status that goes with it."""

    def __init__(self, sentence, status=1):
        super().__init__(sentence)
        self.status = status


def wrong(sentence):
    """What the user wrote is not right, whatever the machine is like."""
    return LabError(sentence, 2)


@dataclass
class Host:
    """One host; None means not limited."""
    name: str
    disk: int = None  # bytes/s
    link: int = None  # bits/s, each direction
    memory: int = None  # bytes
    cpu: float = None  # cores
    files: list = field(default_factory=list)  # absolute paths


@dataclass
class HostsFile:
    path: str
    folder: str
    hosts: list


def quantity(text, units, per_second, bounds, what, example):
    match = QUANTITY.fullmatch(text) if isinstance(text, str) and len(text) <= 40 else None
    if not match or match[2] not in units or bool(match[3]) != per_second:
        raise wrong(f"{what} is {json.dumps(text)}; something like \"{example}\" would be right")
    value = round(float(match[1]) * units[match[2]])
    if not bounds[0] <= value <= bounds[1]:
        low, high = (amount(bound, units, per_second) for bound in bounds)
        raise wrong(f"{what} is \"{text}\"; {low} to {high} would be right")
    return value


def amount(value, units, per_second=False):
    """The shortest way to write a value; amount(disk_rate, BYTES, True) is "100MB/s"."""
    if value is None:
        return "-"
    order = sorted(units.items(), key=lambda unit: -unit[1])
    exact = [(name, size) for name, size in order if value >= size and value % size == 0]
    name, size = exact[0] if exact else next((unit for unit in order if value >= unit[1]), order[-1])
    return f"{value / size:.6g}{name}{'/s' if per_second else ''}"


def disk_rate(text, what):
    return quantity(text, BYTES, True, DISK, what, "100MB/s")


def link_rate(text, what):
    return quantity(text, BITS, True, LINK, what, "1Gbit/s")


def memory_size(text, what):
    return quantity(text, BYTES, False, MEMORY, what, "8GiB")


def cpu_cores(number, what):
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not CPU[0] <= number <= CPU[1]:
        raise wrong(f"{what} is {json.dumps(number)}; a number of cores from {CPU[0]} to {CPU[1]:.0f} would be right")
    return float(number)


LIMITS = {"disk": disk_rate, "link": link_rate, "memory": memory_size, "cpu": cpu_cores}


def no_key_twice(pairs):
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise wrong(f"the key \"{key}\" is there twice in one object")
    return dict(pairs)


def load_json(path):
    try:
        with open(path, "rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise wrong(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise wrong(f"{path}: is longer than {FILE_BYTES_MAX} bytes; that is no lab file")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=no_key_twice)
    except LabError as error:
        raise LabError(f"{path}: {error}", error.status) from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"{path}: is no JSON: {str(error) or 'nested too deep'}") from None


def refuse_other_keys(what, thing, keys):
    for key in thing:
        if key not in keys:
            raise wrong(f"{what} has the unknown key \"{key[:40]}\"; there are {', '.join(keys)}")


def is_path(name):
    """Whether the kernel can be asked for it: no zero byte, no half of a surrogate pair."""
    try:
        return isinstance(name, str) and name != "" and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def file_path(name, base, what):
    if not is_path(name):
        raise wrong(f"{what} has {json.dumps(name)} among its files; a path would be right")
    return os.path.normpath(os.path.join(base, os.path.expanduser(name)))


def read_host(entry, number, base):
    what = f"host {number}"
    if not isinstance(entry, dict):
        raise wrong(f"{what} is {json.dumps(entry)[:60]}; an object with a \"name\" would be right")
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{what} has the name {json.dumps(name)[:60]}; 1 to 31 of a-z, 0-9 and '-' would be right")
    if name in NAMES_TAKEN:
        raise wrong(f"{what} has the name \"{name}\", which means something else here; box1 would be right")
    refuse_other_keys(name, entry, HOST_KEYS)
    limits = {key: read(entry[key], f"{name}: {key}") for key, read in LIMITS.items() if entry.get(key) is not None}
    files = entry.get("files") or []
    if not isinstance(files, list) or len(files) > FILES_MAX:
        raise wrong(f"{name}: files is no list of at most {FILES_MAX} paths")
    paths = [file_path(file, base, name) for file in files]
    refuse_same_base(name, paths)
    return Host(name=name, files=paths, **limits)


def refuse_same_base(name, paths):
    bases = [os.path.basename(path) for path in paths]
    for base in bases:
        if bases.count(base) > 1:
            raise wrong(f"{name}: two files are named {base}; they would be copied to one place")


def read_hosts(thing, base):
    entries = thing.get("hosts")
    if not isinstance(entries, list) or not 1 <= len(entries) <= HOSTS_MAX:
        raise wrong(f"\"hosts\" is no list of 1 to {HOSTS_MAX} hosts")
    hosts = [read_host(entry, number, base) for number, entry in enumerate(entries, 1)]
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise wrong(f"two hosts are named \"{name}\"; every host needs a name of its own")
    return hosts


def read(path):
    """The checked content of a lab file; LabError with a sentence otherwise."""
    thing = load_json(path)
    base = os.path.dirname(os.path.abspath(path))
    try:
        if not isinstance(thing, dict):
            raise wrong("holds no object; {\"hosts\": [..]} would be right")
        refuse_other_keys("the file", thing, ("hosts", "folder"))
        folder = thing.get("folder", "/var/tmp")
        if not is_path(folder):
            raise wrong(f"\"folder\" is {json.dumps(folder)[:60]}; the path of a folder would be right")
        folder = os.path.normpath(os.path.join(base, os.path.expanduser(folder)))
        return HostsFile(path=os.path.abspath(path), folder=folder, hosts=read_hosts(thing, base))
    except LabError as error:
        raise LabError(f"{path}: {error}", error.status) from None
