"""network - hosts as namespaces, joined by a bridge that lies in a namespace of its own.

     box1            box2           this machine
   eth0 | tbf      eth0 | tbf         fllab-…
        |               |                |
     p1 | tbf        p2 | tbf         uplink
   -----+---------------+----------------+----   bridge, in the namespace "switch.lab"

A namespace lives as long as its keeper, a sleeping process, and so do the
links in it: nothing of the network outlives the processes of a lab.  Each
link passes a token bucket filter at both of its ends, so it has its rate in
each direction, whoever sends.

A host has a name, links, /sys, /dev/shm and System V memory of its own: what
would let programs of two hosts meet other than over their links, or take each
other for one machine, is gone.
"""
import ipaddress
import json
import os
import select
import shlex
import subprocess

from hosts_file import LabError

SWITCH = "switch.lab"
UPLINK_HOST = 254  # the machine's own address in the lab's network
# Frames of 9000 bytes: 99 % of a link's rate are the programs' bytes, and the machine has less work with them.
MTU = 9000
GSO_BYTES_MAX = 32 << 10
# What a bucket holds may pass at once. Less than this, and a busy machine wakes too late to fill the link.
BUCKET_S = 0.001
BUCKET_BYTES_MIN = 36 << 10  # a packet of the kernel's must fit
QUEUE_S = 0.02
QUEUE_BYTES_MIN = 256 << 10
READY_SECONDS = 15
TOOLS = ("ip", "tc", "unshare", "nsenter", "sleep")

# What a keeper does before it sleeps: $1 the host's name, $2 its folder of state, $3 "host" or "switch".
KEEPER = """
set -e
echo -1000 2>/dev/null >/proc/self/oom_score_adj || :
hostname "$1"
for file in /proc/sys/net/ipv6/conf/default/disable_ipv6 /proc/sys/net/ipv6/conf/all/disable_ipv6; do
    [ ! -w "$file" ] || echo 1 >"$file"
done
if [ "$3" = host ]; then
    mkdir -p "$2/sys"
    mount -t sysfs -o nosuid,nodev,noexec sysfs "$2/sys"
    mount --rbind /sys/fs/cgroup "$2/sys/fs/cgroup"
    mount --rbind "$2/sys" /sys
    umount -l "$2/sys"
    mount -t tmpfs -o nosuid,nodev,mode=1777 shm /dev/shm
    mount --bind "$2/hosts" /etc/hosts
fi
echo ready
exec sleep infinity >/dev/null 2>&1
"""


def tool_missing(name):
    return LabError(f"'{name}' is not installed; cluster/packages test installs it (iproute2 has ip and tc)", 77)


def run(arguments, what, stdin=None):
    try:
        done = subprocess.run(arguments, input=stdin, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise tool_missing(arguments[0]) from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{what}: {arguments[0]} does not end") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise LabError(f"{what}: {lines[0]}")
    return done.stdout


def free_network(first):
    """A /24 that no address or route of this machine touches; labs that start at once look in different places."""
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"], "routes") or "[]")
    taken = []
    for route in routes:
        try:
            taken.append(ipaddress.ip_network(route.get("dst", "default"), strict=False))
        except ValueError:
            pass  # "default"
    for number in range(256):
        network = ipaddress.ip_network(f"10.77.{(first + number) % 256}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return network
    raise LabError("every network from 10.77.0.0/24 to 10.77.255.0/24 is in use on this machine")


def in_namespace(pid, *arguments):
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--", *arguments]


def configure(pid, name, links, filters):
    """Run batches of `ip` and `tc` lines in the namespace of a keeper."""
    run(in_namespace(pid, "ip", "-batch", "-"), f"network of {name}", "\n".join(links) + "\n")
    if filters:
        run(in_namespace(pid, "tc", "-batch", "-"), f"link rate of {name}", "\n".join(filters) + "\n")


def namespace_of(pid):
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def start_keeper(name, folder, groups, kind):
    """Start a keeper in its control groups and namespaces; its pid once all is set up."""
    join = "".join(f"echo $$ >{shlex.quote(os.path.join(group, 'cgroup.procs'))}\n" for group in groups)
    spaces = ["--net", "--mount", "--uts", "--ipc", "--propagation", "slave"]
    script = f"set -e\n{join}exec unshare {' '.join(spaces)} -- sh -c {shlex.quote(KEEPER)} \"$@\""
    try:
        process = subprocess.Popen(["sh", "-c", script, "keeper", f"lab-{name}", name, folder, kind],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True, cwd="/")
    except FileNotFoundError:
        raise tool_missing("sh") from None
    with process.stdout as out, process.stderr as err:
        ready, _, _ = select.select([out], [], [], READY_SECONDS)
        if ready and out.readline() == "ready\n":
            return process
        process.kill()
        process.wait()
        lines = err.read().strip().splitlines()
    why = lines[0] if lines else f"not ready after {READY_SECONDS} s"
    raise LabError(f"{name}: its namespaces cannot be made: {why}", 77 if "not permitted" in why else 1)


def rate_filter(device, rate):
    """The `tc` line that gives a device its rate; None for none."""
    if rate is None:
        return None
    bucket = max(BUCKET_BYTES_MIN, round(rate / 8 * BUCKET_S))
    queue = max(QUEUE_BYTES_MIN, round(rate / 8 * QUEUE_S))
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {bucket} limit {queue}"


def set_rate(keeper, switch, host, port, rate):
    """Change a link that is up, at both of its ends."""
    for pid, device in ((keeper, "eth0"), (switch, port)):
        line = rate_filter(device, rate)
        if line is None:
            has = "qdisc tbf" in run(in_namespace(pid, "tc", "qdisc", "show", "dev", device), f"link of {host}")
            line = f"qdisc del dev {device} root" if has else None
        if line:
            run(in_namespace(pid, "tc", *line.split()), f"link rate of {host}")


def build(switch, hosts, network, uplink):
    """Bridge, links and filters.  `hosts`: dicts with name, keeper, address, port, link."""
    size = network.prefixlen
    shape = f"mtu {MTU} gso_max_size {GSO_BYTES_MAX}"
    links = ["link set dev lo up", "link add name bridge type bridge",
             f"link add name uplink mtu {MTU} type veth peer name {uplink} mtu {MTU} netns {os.getpid()}"]
    links += [f"link add name {host['port']} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {host['keeper']}"
              for host in hosts]
    for port in ["uplink", *(host["port"] for host in hosts)]:
        links += [f"link set dev {port} {shape} master bridge", f"link set dev {port} up"]
    links.append(f"link set dev bridge mtu {MTU} up")
    configure(switch, SWITCH, links, [line for host in hosts if (line := rate_filter(host["port"], host["link"]))])
    for host in hosts:
        line = rate_filter("eth0", host["link"])
        configure(host["keeper"], host["name"], [
            "link set dev lo up", f"address add {host['address']}/{size} dev eth0", f"link set dev eth0 {shape} up"],
            [line] if line else [])
    run(["ip", "address", "add", f"{network[UPLINK_HOST]}/{size}", "dev", uplink], "link to this machine")
    run(["ip", "link", "set", "dev", uplink, "up"], "link to this machine")


def remove_uplink(uplink):
    """Deleting one end deletes both; the kernel itself would do so, but only some time after the keepers' end."""
    if os.path.isdir(f"/sys/class/net/{uplink}"):
        subprocess.run(["ip", "link", "delete", "dev", uplink], capture_output=True, check=False)


def pids_in(namespaces):
    """Processes in these network namespaces, whatever their control groups."""
    found = set()
    for entry in os.listdir("/proc") if namespaces else []:
        if entry.isdigit() and namespace_of(entry) in namespaces:
            found.add(int(entry))
    return found
