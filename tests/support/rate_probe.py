#!/usr/bin/env python3
"""rate_probe - what a disk and a link deliver, measured from where a node runs.

  rate_probe.py disk FILE SECONDS              O_DIRECT reads, four in flight
  rate_probe.py cached FILE                    one buffered read of a file in the page cache
  rate_probe.py receive ADDRESS PORT SECONDS   says "ready", then takes one connection
  rate_probe.py send ADDRESS PORT SECONDS      until the time is over

Prints one JSON object, {"bytes_s": .., "bytes": ..}.  The first tenth of a second does not count: a
throttle or a shaper lets a burst through.
"""
import json
import mmap
import os
import socket
import statistics
import sys
import threading
import time

SLAB = 512 << 10
IN_FLIGHT = 4
BURST_S = 0.1


class Meter:
    """Bytes by time, and the slope of the line nearest to them: throttles and shapers give in slices, so the ends of a
    measurement are chance."""

    def __init__(self):
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.total, self.samples = 0, []

    def count(self, size):
        with self.lock:
            self.total += size
            at = time.monotonic() - self.started
            if at > BURST_S:
                self.samples.append((at, self.total))

    def result(self):
        try:
            slope = statistics.linear_regression(*zip(*self.samples)).slope
        except (statistics.StatisticsError, TypeError):
            sys.exit(f"rate_probe: {self.total} bytes came in the time given, too few to tell a rate")
        return {"bytes_s": slope, "bytes": self.total}


def disk(path, seconds):
    """Reads on from the start at the file's end."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        sys.exit(f"rate_probe: {path} cannot be read directly: {error.strerror}")
    slabs = os.fstat(file).st_size // SLAB
    if slabs == 0:
        sys.exit(f"rate_probe: {path} is smaller than {SLAB} bytes")
    meter, turns, lock = Meter(), iter(range(1 << 60)), threading.Lock()
    deadline = time.monotonic() + seconds

    def reader():
        buffer = mmap.mmap(-1, SLAB)  # aligned
        while time.monotonic() < deadline:
            with lock:
                turn = next(turns)
            meter.count(os.preadv(file, [buffer], turn % slabs * SLAB))

    readers = [threading.Thread(target=reader) for _ in range(IN_FLIGHT)]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    return meter.result()


def cached(path):
    buffer, total = bytearray(SLAB), 0
    started = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            total += size
    return {"bytes_s": total / (time.monotonic() - started), "bytes": total}


def receive(address, port, seconds):
    with socket.create_server((address, port)) as listener:
        listener.settimeout(20 + seconds)
        print("ready", flush=True)
        link, _ = listener.accept()
    meter, buffer = Meter(), bytearray(SLAB)
    link.settimeout(20)
    while size := link.recv_into(buffer):
        meter.count(size)
    return meter.result()


def send(address, port, seconds):
    data, total = bytes(1 << 16), 0
    started = time.monotonic()
    with socket.create_connection((address, port), timeout=20) as link:
        while time.monotonic() - started < seconds:
            total += link.send(data)
    return {"bytes_s": total / (time.monotonic() - started), "bytes": total}


def main():
    what, *rest = sys.argv[1:] or ["--help"]
    actions = {("disk", 2): lambda: disk(rest[0], float(rest[1])), ("cached", 1): lambda: cached(rest[0]),
               ("receive", 3): lambda: receive(rest[0], int(rest[1]), float(rest[2])),
               ("send", 3): lambda: send(rest[0], int(rest[1]), float(rest[2]))}
    if what in ("-h", "--help"):
        print(__doc__)
    elif (what, len(rest)) not in actions:
        sys.exit(f"rate_probe: '{' '.join(sys.argv[1:])}' is not understood; see --help")
    else:
        print(json.dumps(actions[what, len(rest)]()), flush=True)


if __name__ == "__main__":
    main()
