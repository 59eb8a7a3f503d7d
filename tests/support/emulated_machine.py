"""A PC of any kind of processor, emulated instruction by instruction: Linux, and a script in it.

Bochs executes the machine code itself, so a processor that nobody has at hand can be tried: its CPUID,
what the operating system saves of its registers, every instruction.  An Image is a boot CD (a kernel
package's kernel, busybox) and a disk (programs, the libraries they load, model files), made once;
Image.run() boots a processor from it and returns what the script's steps said (emulated_guest.sh).

All of it lies in one temporary folder of the caller; nothing is mounted, nothing installed, root not
needed.  A machine that says nothing new for STALL_S seconds, or whose kernel panics, is stopped.
"""
import os
import re
import shutil
import subprocess
import time
import tty

import pool

STALL_S = 5400  # the longest step says nothing before its end
POLL_S = 0.5
MEMORY_MIB = 2048
# Instructions of an emulated second: about what the emulator does in a real one, so that the
# programs' own time limits mean what they mean elsewhere.
INSTRUCTIONS_PER_S = 100_000_000
GUEST = "/firstlight"
ISOLINUX = "/usr/lib/ISOLINUX/isolinux.bin"
ISOLINUX_LOADER = "/usr/lib/syslinux/modules/bios/ldlinux.c32"
BIOS = "/usr/share/bochs/BIOS-bochs-latest"
VGA_BIOS = "/usr/share/bochs/VGABIOS-lgpl-latest"
PACKAGES = {"bochs-bin": "bochs", BIOS: "bochsbios", VGA_BIOS: "vgabios",
            "/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so": "bochs-term", ISOLINUX: "isolinux",
            ISOLINUX_LOADER: "syslinux-common", "xorriso": "xorriso", "busybox": "busybox-static", "cpio": "cpio",
            "mke2fs": "e2fsprogs"}
KERNEL = "linux-image-cloud-amd64"
# In this order: what a disk of this PC needs, and this kernel has as modules.
MODULES = ("scsi/scsi_common", "scsi/scsi_mod", "ata/libata", "ata/ata_piix", "scsi/sd_mod")
APPLETS = ("sh", "cat", "date", "echo", "grep", "ip", "kill", "mkdir", "mount", "poweroff", "rm", "sleep", "stty", "uname",
           "wc")
# With PKU or the compact formats Bochs 2.7 says one size of the saved registers and uses another, and
# Linux then saves none beyond SSE's; with one of the others an Ice Lake faults in its fault handler.
KERNEL_ARGUMENTS = "console=ttyS0,115200 nokaslr mitigations=off panic=0 clearcpuid={}"
BOCHS_FAULTS = ("pku", "xsaves", "xsavec", "rdpid", "fsrm", "umip")

INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t sysfs none /sys
/bin/busybox mount -t devtmpfs none /dev
for module in {modules}; do /bin/busybox insmod /lib/$module.ko; done
until [ -b /dev/sda ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 -o ro /dev/sda /disk
/bin/busybox mount -t tmpfs none /disk/tmp
for folder in proc sys dev; do /bin/busybox mount --move /$folder /disk/$folder; done
exec /bin/busybox chroot /disk /bin/sh /scripts/$machine
"""

BOOT_MENU = """default {first}
prompt 0
"""
BOOT_ENTRY = """label {name}
kernel /vmlinuz
append initrd=/initrd machine={name} {arguments}
"""

SETTINGS = """display_library: term
plugin_ctrl: unmapped=1, biosdev=1, speaker=0, parallel=0, serial=1
megs: {memory}
cpu: model={cpu}, count=1, ips={ips}, reset_on_triple_fault=0, ignore_bad_msrs=1
romimage: file={bios}
vgaromimage: file={vga_bios}
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path="{disk}", mode=flat
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata1-master: type=cdrom, path="{cd}", status=inserted
boot: cdrom
clock: sync=none, time0=local
com1: enabled=1, mode=file, dev={console}
com2: enabled=1, mode=file, dev={results}
log: /dev/null
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
"""


class Failed(Exception):
    """A machine that could not be made, or did not do what it was to do."""


def missing_packages():
    """Debian packages that this machine lacks, the kernel's excepted."""
    found = lambda what: os.path.exists(what) if what.startswith("/") else shutil.which(what)
    return [package for what, package in PACKAGES.items() if not found(what)]


def run(*line, **how):
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=how.pop("stdin", subprocess.DEVNULL),
                          text=True, errors="replace", check=False, **how)
    if done.returncode != 0:
        raise Failed(f"{' '.join(line[:4])} exited {done.returncode}: {done.stdout.strip()[-300:]}")
    return done.stdout


def libraries(programs):
    """Every shared library they load, with the loader, by the paths they ask for."""
    found = set()
    for program in programs:
        found.update(re.findall(r"(/\S+) \(0x", run("ldd", program)))
    return sorted(found)


class Step:
    """What one step of the script said, and its exit status."""

    def __init__(self, status, text):
        self.status, self.text = status, text


def steps(results):
    """{name: Step} from what came over the port; a step under way is not in it."""
    found = {}
    for name, text, status in re.findall(r"^@begin (.*?)\n(.*?)\n@end (\d+)$", results.replace("\r", ""), re.S | re.M):
        found[name] = Step(int(status), text.strip())
    return found


def unpack_kernel(folder, package=None):
    """The kernel of a package file, else of the distribution's package, fetched but not installed."""
    os.makedirs(folder)
    if package is None:
        depends = run("apt-cache", "depends", "--important", KERNEL)
        real = re.search(r"Depends: (linux-image-\S+)", depends)
        if not real:
            raise Failed(f"no package {KERNEL} is known; 'apt-get update', or a package file with --kernel, would be right")
        run("apt-get", "download", real.group(1), cwd=folder)
        package = os.path.join(folder, next(name for name in os.listdir(folder) if name.endswith(".deb")))
    run("dpkg-deb", "-x", package, folder)
    image = [name for name in os.listdir(os.path.join(folder, "boot")) if name.startswith("vmlinuz-")]
    if len(image) != 1:
        raise Failed(f"{package} has {len(image)} kernels; one would be right")
    release = image[0].removeprefix("vmlinuz-")
    return os.path.join(folder, "boot", image[0]), os.path.join(folder, "lib/modules", release, "kernel/drivers"), release


class Screen:
    """The terminal that Bochs opens for the PC's screen.  Nobody looks at it, but it must be read: a full
    one holds up the machine for good."""

    def __init__(self, pid):
        self.pid, self.fd = pid, None

    def find(self):
        folder = f"/proc/{self.pid}/fdinfo"
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="ascii") as info:
                index = re.search(r"^tty-index:\s*(\d+)$", info.read(), re.M)
            if index:
                self.fd = os.open(f"/dev/pts/{index.group(1)}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
                tty.setraw(self.fd)

    def drain(self):
        try:
            if self.fd is None:
                self.find()
            while self.fd is not None and os.read(self.fd, 1 << 16):
                pass
        except OSError:
            pass  # nothing more to read, not opened yet, or the machine has ended, which follow() sees

    def close(self):
        if self.fd is not None:
            os.close(self.fd)


class Image:
    """A boot CD and a disk in `folder`.  `scripts` maps a machine's name to what it runs and the kernel's
    arguments; `files` maps paths in the machine to files here, `programs` are such files that need
    their libraries."""

    def __init__(self, folder, scripts, files, programs, kernel=None):
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self.names = list(scripts)
        vmlinuz, drivers, self.release = unpack_kernel(self.path("kernel"), kernel)
        self.make_disk({name: script for name, (script, _) in scripts.items()}, files, programs)
        self.make_initrd(drivers)
        shutil.copy(vmlinuz, self.path("cd/vmlinuz"))
        shutil.copy(ISOLINUX, self.path("cd/isolinux.bin"))
        shutil.copy(ISOLINUX_LOADER, self.path("cd/ldlinux.c32"))
        self.arguments = {name: arguments for name, (_, arguments) in scripts.items()}

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def make_disk(self, scripts, files, programs):
        root = self.path("disk")
        for name in ("bin", "dev", "proc", "sys", "tmp", "models", "scripts"):
            os.makedirs(os.path.join(root, name))
        put = {**files, **programs, "/bin/busybox": shutil.which("busybox"),
               "/scripts/emulated_guest.sh": os.path.join(pool.ROOT, "tests/support/emulated_guest.sh")}
        plugins = "/usr/lib/x86_64-linux-gnu/ucx"  # UCX looks for them where it was built for
        if os.path.isdir(plugins):
            os.makedirs(root + plugins)
        for inside, here in {**put, **{path: path for path in libraries(programs.values())}}.items():
            os.makedirs(os.path.dirname(root + inside), exist_ok=True)
            shutil.copy(os.path.realpath(here), root + inside)
        for applet in APPLETS:
            os.symlink("busybox", os.path.join(root, "bin", applet))
        for name, script in scripts.items():
            with open(os.path.join(root, "scripts", name), "w", encoding="utf-8") as file:
                file.write(f". /scripts/emulated_guest.sh\n{script}\necho @done >/dev/ttyS1\nsleep 1\npoweroff -f\n")
        size = sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(root) for name in names
                   if not os.path.islink(os.path.join(at, name)))
        blocks = (size * 11 // 10 >> 20) + 32
        run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", root, self.path("disk.img"), f"{blocks}M")
        shutil.rmtree(root)

    def make_initrd(self, drivers):
        root = self.path("initrd")
        for name in ("bin", "dev", "disk", "lib", "proc", "sys"):
            os.makedirs(os.path.join(root, name))
        os.makedirs(self.path("cd"))
        shutil.copy(shutil.which("busybox"), os.path.join(root, "bin/busybox"))
        for module in MODULES:
            shutil.copy(os.path.join(drivers, module + ".ko"), os.path.join(root, "lib"))
        with open(os.path.join(root, "init"), "w", encoding="utf-8") as file:
            file.write(INIT.format(modules=" ".join(os.path.basename(module) for module in MODULES)))
        os.chmod(os.path.join(root, "init"), 0o755)
        names = "\n".join(os.path.relpath(os.path.join(at, name), root) for at, folders, files in os.walk(root)
                          for name in folders + files)
        with open(self.path("cd/initrd"), "wb") as out:
            done = subprocess.run(["cpio", "--quiet", "-o", "-H", "newc"], input=names.encode(), stdout=out, cwd=root,
                                  check=False)
        if done.returncode != 0:
            raise Failed(f"cpio exited {done.returncode}")

    def make_cd(self, name):
        arguments, cleared = self.arguments[name]
        with open(self.path("cd/isolinux.cfg"), "w", encoding="utf-8") as file:
            file.write(BOOT_MENU.format(first=name) + BOOT_ENTRY.format(
                name=name, arguments=KERNEL_ARGUMENTS.format(",".join((*BOCHS_FAULTS, *cleared))) + arguments))
        run("xorriso", "-as", "mkisofs", "-quiet", "-o", self.path("boot.iso"), "-b", "isolinux.bin", "-c", "boot.cat",
            "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", self.path("cd"))

    def run(self, name, cpu, said=lambda name, step: None):
        """Boots this machine with a processor of Bochs' list; its steps.  said() is called for each as it ends."""
        self.make_cd(name)
        results, console, settings = (self.path(f"{name}.{what}") for what in ("results", "console", "bochsrc"))
        with open(settings, "w", encoding="utf-8") as file:
            file.write(SETTINGS.format(memory=MEMORY_MIB, cpu=cpu, ips=INSTRUCTIONS_PER_S, bios=BIOS, vga_bios=VGA_BIOS,
                                       disk=self.path("disk.img"), cd=self.path("boot.iso"), console=console,
                                       results=results))
        with open(self.path("go"), "w", encoding="ascii") as file:
            file.write("c\n")  # Debian's Bochs has the debugger in it, and that waits to be told
        for old in (results, console, self.path("disk.img.lock")):
            if os.path.exists(old):
                os.remove(old)
        with open(self.path(f"{name}.screen"), "wb") as said_by_bochs:
            bochs = subprocess.Popen(["bochs-bin", "-q", "-rc", self.path("go"), "-f", settings], stdin=subprocess.DEVNULL,
                                     stdout=said_by_bochs, stderr=said_by_bochs, env={**os.environ, "TERM": "linux"})
        screen = Screen(bochs.pid)
        try:
            return self.follow(bochs, screen, name, said)
        finally:
            bochs.kill()
            bochs.wait()
            screen.close()

    def follow(self, bochs, screen, name, said):
        seen, size, since = set(), -1, time.monotonic()
        while True:
            screen.drain()
            text = self.read(f"{name}.results")
            found = steps(text)
            for step in found:
                if step not in seen:
                    seen.add(step)
                    said(step, found[step])
            if re.search(r"^@done\s*$", text, re.M):
                return found
            console = self.read(f"{name}.console")
            if bochs.poll() is not None or "Kernel panic" in console:
                raise Failed(f"machine {name} ended early: {(console or self.read(f'{name}.screen'))[-600:]}")
            if len(text) + len(console) != size:
                size, since = len(text) + len(console), time.monotonic()
            if time.monotonic() - since > STALL_S:
                raise Failed(f"machine {name} has said nothing for {STALL_S} s; last: {(text + console)[-300:]}")
            time.sleep(POLL_S)

    def read(self, name):
        if not os.path.exists(self.path(name)):
            return ""
        with open(self.path(name), encoding="utf-8", errors="replace") as file:
            return file.read()
