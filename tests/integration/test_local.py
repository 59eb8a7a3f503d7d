#!/usr/bin/env python3
"""What people launch with: cluster/local."""
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool as cluster

LOCAL = os.path.join(cluster.ROOT, "cluster", "local")
# Says its place, counts interrupts as a chat would, and asks the cluster for its nodes afterwards.
PATIENT = """
import json, os, signal, subprocess, sys
signal.signal(signal.SIGINT, lambda number, frame: print("interrupted", flush=True))
print(os.environ["FIRSTLIGHT_PIDS"], flush=True)
print("read", input(), flush=True)
nodes = json.loads(subprocess.run(["firstlight", "status", "--json"], stdout=subprocess.PIPE, check=True).stdout)["nodes"]
print("nodes", len(nodes), flush=True)
sys.exit(7)
"""


def environment(folder):
    return {**os.environ, "TMPDIR": folder, "FIRSTLIGHT_BUILD": cluster.BUILD}


def local(folder, *arguments, **more):
    return subprocess.run([LOCAL, "--models", folder, *arguments], env=environment(folder), capture_output=True, text=True,
                          timeout=120, check=False, **more)


def on_a_terminal(folder, *arguments):
    """The script's pid, and the terminal it runs on."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(LOCAL, [LOCAL, "--models", folder, *arguments], environment(folder))
    return pid, os.fdopen(terminal, "r+b", buffering=0)


def ended(pids):
    return all(not os.path.exists(f"/proc/{pid}") for pid in pids)


def the_status_is_the_commands_and_nothing_is_left():
    with tempfile.TemporaryDirectory() as folder:
        done = local(folder, "--nodes", "2", "--", "sh", "-c", "read line; echo $FIRSTLIGHT_PIDS $line; exit 7", input="here\n")
        *pids, line = done.stdout.split()
        assert (done.returncode, line, len(pids)) == (7, "here", 3), done
        assert ended(pids) and os.listdir(folder) == [], os.listdir(folder)
        done = local(folder, "--", "no-such-command")
        assert done.returncode == 127 and "no-such-command" in done.stderr, done


def the_interrupt_key_is_the_commands_to_answer():
    with tempfile.TemporaryDirectory() as folder:
        pid, screen = on_a_terminal(folder, "--nodes", "2", "--", sys.executable, "-c", PATIENT)
        with screen:
            shown = b""

            def until(word):
                nonlocal shown
                while word not in shown:
                    shown += screen.read(4096)
            until(b"\n")
            pids = shown.split()
            screen.write(b"\x03")
            until(b"interrupted")
            screen.write(b"on\n")
            until(b"nodes 2")
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, shown
        assert len(pids) == 3 and ended(int(pid) for pid in pids) and os.listdir(folder) == [], shown


def the_interrupt_key_ends_what_does_not_answer_it():
    for command, status in (("exec sleep 100", 130), ("trap 'exit 4' INT; sleep 100", 4)):
        with tempfile.TemporaryDirectory() as folder:
            pid, screen = on_a_terminal(folder, "--", "bash", "-c", f"echo $FIRSTLIGHT_PIDS; {command}")
            with screen:
                pids = screen.readline().split()
                time.sleep(0.2)  # bash sets its trap
                screen.write(b"\x03")
                ended_as = []
                cluster.wait_until(lambda: ended_as.append(os.waitpid(pid, os.WNOHANG)) or ended_as[-1][0], 30, "local ends")
            assert os.waitstatus_to_exitcode(ended_as[-1][1]) == status, (command, ended_as[-1])
            assert len(pids) == 2 and ended(int(pid) for pid in pids) and os.listdir(folder) == [], os.listdir(folder)


def check_signal(send, number):
    with tempfile.TemporaryDirectory() as folder:
        with subprocess.Popen([LOCAL, "--models", folder, "--", "sh", "-c", "echo $FIRSTLIGHT_PIDS $$; exec sleep 100"],
                              env=environment(folder), stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            pids = process.stdout.readline().split()
            started = time.monotonic()
            send(process.pid, number)
            assert process.wait(60) == 128 + number and time.monotonic() - started < 30
        assert len(pids) == 3 and ended(pids) and os.listdir(folder) == [], os.listdir(folder)


def a_signal_ends_all():
    for number in (signal.SIGTERM, signal.SIGHUP):
        check_signal(os.kill, number)
        check_signal(os.killpg, number)


def an_interrupted_model_leaves_no_half():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        out = os.path.join(folder, "model.gguf")
        with subprocess.Popen([cluster.program("mkmodel"), "--out", out], stderr=subprocess.PIPE, text=True) as process:
            cluster.wait_until(lambda: process.poll() is not None or os.path.exists(out + ".part"), 30, "mkmodel writes")
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
        if process.returncode != 130 and "free" in said:
            raise cluster.Skip(f"no room for a model: {said.strip()}")
        assert process.returncode == 130 and "interrupted" in said, (process.returncode, said)
        assert os.listdir(folder) == [], os.listdir(folder)


def a_place_that_cannot_be_written_is_found_out_at_once():
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "file")
        with open(file, "w", encoding="ascii"):
            pass
        done = local(folder, "--logs", os.path.join(file, "logs"), "--", "true")
        assert done.returncode == 2 and "--logs" in done.stderr, done
        assert os.listdir(folder) == ["file"], os.listdir(folder)


if __name__ == "__main__":
    cluster.main([a_place_that_cannot_be_written_is_found_out_at_once, the_status_is_the_commands_and_nothing_is_left,
                  an_interrupted_model_leaves_no_half, the_interrupt_key_is_the_commands_to_answer,
                  the_interrupt_key_ends_what_does_not_answer_it, a_signal_ends_all])
