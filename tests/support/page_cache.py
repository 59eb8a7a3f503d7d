"""Which share of a file lies in the page cache, and how to fill or empty it there; as the kernel says (mincore)."""
import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
MAP_FAILED = ctypes.c_void_p(-1).value
SLAB = 4 << 20


def fail(path):
    error = ctypes.get_errno()
    raise OSError(error, os.strerror(error), path)


def resident(path):
    """(pages of the file in the page cache, pages of the file)."""
    size = os.path.getsize(path)
    if size == 0:
        return 0, 0
    pages = (size + PAGE - 1) // PAGE
    with open(path, "rb") as file:
        at = LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if at == MAP_FAILED:
            fail(path)
        states = ctypes.create_string_buffer(pages)
        bad = LIBC.mincore(at, size, states)
        LIBC.munmap(at, size)
        if bad:
            fail(path)
    return sum(state & 1 for state in states.raw[:pages]), pages


def share(paths):
    """Of all these files together, 0.0 to 1.0."""
    counts = [resident(path) for path in paths]
    pages = sum(count for _, count in counts)
    return sum(count for count, _ in counts) / pages if pages else 0.0


def drop(paths):
    """Ask the kernel to let go of these files; another process that maps one keeps its pages."""
    for path in paths:
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(paths):
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(SLAB):
                pass
