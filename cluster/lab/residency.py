"""residency - which bytes of files the page cache holds, and getting them out.

Cold means that the next read comes from the disk.  Asking the kernel to drop
its cache is not enough to know it: pages that a process maps stay, and so do
pages that somebody reads again.  So the cache is asked afterwards, page by
page, and what stayed is told with the process that keeps it.
"""
import ctypes
import mmap
import os
import stat

from hosts_file import LabError

DROP = "/proc/sys/vm/drop_caches"
WINDOW_BYTES = 1 << 30
TRIES = 3
PAGE = mmap.PAGESIZE

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
MAP_FAILED = ctypes.c_void_p(-1).value


def files_below(folders):
    """Every regular file in these folders."""
    found = []
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    if stat.S_ISREG(os.lstat(path).st_mode):
                        found.append(path)
                except FileNotFoundError:
                    pass  # temporary, and gone by now
    return found


def open_regular(path):
    """A descriptor; LabError for what is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a pipe's other end
    except OSError as error:
        raise LabError(f"{path}: cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LabError(f"{path}: is no regular file; only files can be cold")
    return descriptor


def resident_window(descriptor, offset, size):
    """Resident pages of one window; a mapping alone brings no page in."""
    address = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        pages = (size + PAGE - 1) // PAGE
        vector = ctypes.create_string_buffer(pages)
        if LIBC.mincore(address, size, vector) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return sum(byte & 1 for byte in vector.raw) if any(vector.raw) else 0
    finally:
        LIBC.munmap(address, size)


def resident_bytes(path):
    """(bytes of a file in the page cache, bytes of the file)."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        pages = sum(resident_window(descriptor, offset, min(WINDOW_BYTES, size - offset))
                    for offset in range(0, size, WINDOW_BYTES))
        return min(size, pages * PAGE), size
    except OSError as error:
        raise LabError(f"{path}: the kernel does not say what is in its page cache: {error.strerror}") from None
    finally:
        os.close(descriptor)


def forget(path):
    """Advise the kernel that a written-out file is not needed; says nothing about success."""
    descriptor = open_regular(path)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def drop_everything():
    try:
        with open(DROP, "w", encoding="ascii") as file:
            file.write("3")
    except OSError as error:
        raise LabError(f"the page cache cannot be dropped ({DROP}: {error.strerror}); run this as root, outside of a "
                       "container", 77) from None


def mapping_processes(path):
    """(pid, name) of every process that maps a file."""
    wanted = os.stat(path)
    device = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x}"
    real = os.path.realpath(path)
    found = []
    for entry in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
        try:
            with open(f"/proc/{entry}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                fields = (line.rstrip("\n").split(None, 5) for line in maps)
                # btrfs shows another device there than stat does: the path counts as well.
                if any((row[3] == device and row[4] == str(wanted.st_ino)) or row[5:] == [real] for row in fields):
                    with open(f"/proc/{entry}/comm", encoding="utf-8", errors="replace") as comm:
                        found.append((int(entry), comm.read().strip()))
        except OSError:
            pass  # it has ended
    return found


def blame(path, resident, size):
    """One sentence on why a file is still in the page cache."""
    keepers = mapping_processes(path)
    share = f"{path} is still in the page cache ({resident} of {size} bytes)"
    if not keepers:
        return f"{share}, and no process maps it: something reads or writes it just now"
    names = ", ".join(f"{name} (pid {pid})" for pid, name in keepers)
    return f"{share}: {names} {'maps' if len(keepers) == 1 else 'map'} it; stop {'it' if len(keepers) == 1 else 'them'}"


def make_cold(paths):
    """Get every file out of the page cache, and verify it.  (bytes of the files, sentences on what stayed)."""
    os.sync()
    left = list(paths)
    total = 0
    for attempt in range(TRIES):
        for path in left:
            forget(path)
        drop_everything()
        states = [(path, *resident_bytes(path)) for path in left]
        if attempt == 0:
            total = sum(size for _, _, size in states)
        warm = [state for state in states if state[1] > 0]
        if not warm:
            return total, []
        left = [path for path, _, _ in warm]
    return total, [blame(*state) for state in warm]
