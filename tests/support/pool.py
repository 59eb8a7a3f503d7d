"""A real cluster on loopback for integration tests: processes, sockets, the client tool.

Every process is started by a Pool and stopped by its id when the Pool closes.
Tests are programs of named cases run by main(); a case that raises Skip is
skipped, one that raises anything else has failed.
"""
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback

from owned_folder import OwnedFolder

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("FIRSTLIGHT_BUILD", os.path.join(ROOT, "build", "release"))
MODELS = os.environ.get("FIRSTLIGHT_MODELS", os.path.expanduser("~/.cache/firstlight/models"))
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"
GEMMA3 = "gemma-3-270m-q4_k_m"


class Skip(Exception):
    """What the machine lacks."""


def program(name):
    path = os.path.join(BUILD, name)
    if not os.access(path, os.X_OK):
        path = os.path.join(BUILD, "tests", name)
    return path


def need_model(name):
    if not os.path.exists(os.path.join(MODELS, name + ".gguf")):
        raise Skip(f"model {name} is not in {MODELS}; cluster/models fetches it")


def free_port():
    """One that nobody has, below those that the kernel gives to connections: one of these might be given to
    another test's before the program that is to listen there has begun."""
    for _ in range(100):
        port = random.randrange(10000, 20000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise AssertionError("100 ports from 10000 to 19999 are taken")


def cpu_has(*flags):
    with open("/proc/cpuinfo", encoding="ascii") as info:
        line = next(line for line in info if line.startswith("flags"))
    return set(flags) <= set(line.split())


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def signal_is(mask, pid, number):
    """Whether a process has a signal in its mask "SigBlk" (it is blocked) or "SigCgt" (it has a handler)."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        bits = next(line for line in status if line.startswith(mask)).split()[1]
    return bool(int(bits, 16) >> (number - 1) & 1)


class Process:
    """One program with its log."""

    def __init__(self, arguments, log, env=None):
        self.arguments = arguments
        self.log_path = log
        with open(log, "ab") as out:
            self.popen = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                          env={**os.environ, **(env or {})})

    @property
    def pid(self):
        return self.popen.pid

    def alive(self):
        return self.popen.poll() is None

    def kill(self):
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def stop(self, seconds=5):
        """Ask, then insist; the exit status, or None when it had to be killed."""
        if self.alive():
            self.popen.terminate()
            try:
                return self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                return None
        return self.popen.returncode

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def memory(self):
        """Resident bytes now."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmRSS"):
                    return int(line.split()[1]) * 1024
        return 0

    def cpu_seconds(self):
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Answer:
    """What one run of the client tool gave."""

    def __init__(self, arguments, status, out, err):
        self.arguments, self.status, self.out, self.err = arguments, status, out, err

    def json(self):
        assert self.status == 0, f"{self.arguments} exited {self.status}: {self.err.strip()}"
        return json.loads(self.out)

    def error(self):
        """The one error line; asserts that it failed, and with one line only."""
        assert self.status != 0, f"{self.arguments} succeeded: {self.out[:200]}"
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, f"{self.arguments}: one error line wanted, got {lines}"
        return lines[0]


class Pool:
    def __init__(self, nodes=1, models=MODELS, coordinator=(), node=(), fetch=False, mpi=False, threads=None,
                 wait=True, key=None, env=None):
        self.own = OwnedFolder("firstlight-test.")
        self.folder = self.own.path
        self.models, self.fetch, self.node_arguments = models, fetch, list(node)
        self.coordinator_arguments = list(coordinator)
        self.threads = threads or max(1, (os.cpu_count() or 1) // max(1, nodes))
        self.key, self.env = key, env or {}
        self.join = f"127.0.0.1:{free_port()}"
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes = {}
        self.coordinator = self.mpirun = None
        self.started = []
        try:
            if mpi:
                self.start_mpi(nodes)
            else:
                self.start_coordinator()
                for number in range(1, nodes + 1):
                    self.start_node(f"box{number}")
            if wait:
                self.wait_for(nodes)
        except BaseException:
            self.close()
            raise

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, name, arguments):
        process = Process(arguments, self.path(f"{name}.log"), self.env)
        self.started.append(process)
        return process

    def key_arguments(self):
        return ["--key-file", self.key] if self.key else []

    def start_coordinator(self):
        self.coordinator = self.start("coordinator", [
            program("firstlight-coordinator"), "--listen", self.join, "--client-listen", self.address,
            "--models", self.models, *self.key_arguments(), *self.coordinator_arguments])

    def node_line(self, name, *more):
        line = [program("firstlight-node"), "--name", name, "--threads", str(self.threads), "--cache",
                self.path(f"cache-{name}"), *self.node_arguments, *more]
        return line if self.fetch else [*line, "--models", self.models]

    def start_node(self, name, *more):
        self.nodes[name] = self.start(name, [*self.node_line(name), "--join", self.join, *self.key_arguments(), *more])
        return self.nodes[name]

    def start_mpi(self, nodes):
        if shutil.which("mpirun") is None:
            raise Skip("mpirun is not installed")
        line = ["mpirun", "--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            line.append("--allow-run-as-root")
        line += ["-np", "1", program("firstlight-coordinator"), "--client-listen", self.address, "--models",
                 self.models, *self.coordinator_arguments]
        for number in range(1, nodes + 1):
            line += [":", "-np", "1", *self.node_line(f"box{number}")]
        self.mpirun = self.start("mpirun", line)

    def status(self):
        answer = self.run("status", "--json", timeout=20)
        return json.loads(answer.out) if answer.status == 0 else {}

    def ready(self, status=None):
        nodes = (status or self.status()).get("nodes", [])
        return sorted(node["name"] for node in nodes if node["state"] != "lost")

    def joined(self, nodes):
        """True when the coordinator answers and has that many nodes, be it none."""
        status = self.status()
        return bool(status) and len(self.ready(status)) == nodes

    def wait_for(self, nodes, seconds=30):
        try:
            wait_until(lambda: self.joined(nodes), seconds, f"{nodes} nodes joined")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self):
        return "\n".join(f"--- {process.log_path}\n{process.log()[-3000:]}" for process in self.started)

    def client(self, *arguments):
        """The tool, running; the caller waits or kills."""
        process = subprocess.Popen([program("firstlight"), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, env={**os.environ, **self.client_env()})
        return process

    def client_env(self):
        env = {"FIRSTLIGHT_ADDR": self.address}
        if self.key:
            env["FIRSTLIGHT_KEY_FILE"] = self.key
        return env

    def run(self, *arguments, stdin=b"", timeout=120, env=None):
        done = subprocess.run([program("firstlight"), *arguments], input=stdin, capture_output=True, timeout=timeout,
                              env={**os.environ, **self.client_env(), **(env or {})}, check=False)
        return Answer(arguments, done.returncode, done.stdout.decode("utf-8", "replace"),
                      done.stderr.decode("utf-8", "replace"))

    def generate(self, model, *arguments, timeout=120):
        answer = self.run("generate", "--model", model, "--json", *arguments, timeout=timeout)
        if answer.status == 0:
            check_phases(answer.json())
        return answer

    def close(self):
        for process in reversed(self.started):
            process.stop()
        self.own.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None and not issubclass(kind, Skip):
            print(self.logs())
        self.close()


def check_phases(got):
    """What phases exposed of the time to the first token is all of it."""
    exposed = sum(phase["exposed_ms"] for phase in got["phases"])
    assert abs(exposed - got["ttft_ms"]) <= 1e-6 * got["ttft_ms"] + 1e-6, got
    assert (got["ttft_ms"] > 0) == (len(got["phases"]) > 0), got


def golden(name):
    """Records of tests/golden/NAME.jsonl; lines end with a line feed and nothing else."""
    with open(os.path.join(ROOT, "tests", "golden", name + ".jsonl"), encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file.read().split("\n") if line]


def longest_prompt(name):
    """Token ids of which shorter prompts are the beginnings."""
    return max(golden(name), key=lambda record: record["n_prompt"])["prompt_tokens"]


def tokens_text(tokens):
    return ",".join(map(str, tokens))


def interrupted(number, _):
    raise KeyboardInterrupt(number)


def clean_up_on_signals():
    """Whoever ends this program means its processes, too: every block that has started some is left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)


def main(cases):
    """Run the cases, or those whose name contains the first argument; exit as tests/harness.h does."""
    clean_up_on_signals()
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = skipped = 0
    for case in cases:
        name = case.__name__.replace("_", " ")
        if wanted not in name:
            continue
        started = time.monotonic()
        try:
            case()
            passed += 1
            verdict = "ok   "
        except Skip as reason:
            skipped += 1
            verdict = "skip "
            print(f"  skipped: {reason}")
        except Exception:
            failed += 1
            verdict = "FAIL "
            traceback.print_exc(file=sys.stdout)
        print(f"{verdict} {name} ({time.monotonic() - started:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed or passed + skipped == 0 else 77 if passed == 0 else 0)
