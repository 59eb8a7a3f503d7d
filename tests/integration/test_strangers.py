#!/usr/bin/env python3
"""Garbage, silence and strangers on either port: only their own connection pays."""
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

MODEL = cluster.SMOLLM2


def works(pool):
    answer = pool.generate(MODEL, "--prompt", "Hello", "--max-tokens", "4").json()
    assert len(answer["tokens"]) == 4
    assert pool.coordinator.alive() and all(node.alive() for node in pool.nodes.values())


def connect(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=15)


def closed_by_peer(connection, seconds):
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
        return True
    except ConnectionError:
        return True
    except socket.timeout:
        return False


GARBAGE = [
    b"\0" * 64,
    b"\xff" * 4096,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    struct.pack("<I", 0),
    struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff",
    struct.pack("<I", 3) + b"FLH",
    struct.pack("<I", 0x7FFFFFFF) + b"x" * 1000,
    os.urandom(4096),
]


def garbage_on_the_client_port():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=1) as pool:
        for garbage in GARBAGE:
            with connect(pool.address) as stranger:
                stranger.sendall(garbage)
                assert closed_by_peer(stranger, 10) or len(garbage) < 5, f"kept open after {garbage[:16]!r}"
        works(pool)


def half_frame_then_silence():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=1) as pool:
        with connect(pool.address) as half:
            half.sendall(struct.pack("<I", 1000) + b"x" * 10)
            works(pool)
        works(pool)


def garbage_on_the_node_port():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        works(pool)
        for garbage in GARBAGE:
            with connect(pool.join) as stranger:
                stranger.sendall(garbage)
                time.sleep(0.1)
        silent = [connect(pool.join) for _ in range(20)]
        works(pool)
        for stranger in silent:
            stranger.close()
        works(pool)
        assert pool.ready() == ["box1", "box2"]


def many_silent_clients():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=1) as pool:
        silent = [connect(pool.address) for _ in range(100)]
        works(pool)
        for stranger in silent:
            stranger.close()


def client_that_vanishes_frees_the_cluster():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        works(pool)
        for _ in range(3):
            running = pool.client("generate", "--model", MODEL, "--prompt", "Count:", "--max-tokens", "2000",
                                  "--ignore-end")
            assert running.stdout.read(1)
            running.kill()
            running.wait()
            cluster.wait_until(lambda: all(loaded["requests_running"] == 0 for loaded in pool.status()["loaded"]), 10,
                               "the request of a vanished client ends")
        works(pool)


def key_file(pool_folder, name):
    path = os.path.join(pool_folder, name)
    done = subprocess.run([cluster.program("firstlight"), "keygen", "--out", path], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert os.stat(path).st_mode & 0o777 == 0o600
    return path


def wrong_and_missing_keys_are_refused():
    cluster.need_model(MODEL)

    with tempfile.TemporaryDirectory() as folder:
        right, wrong = key_file(folder, "right.key"), key_file(folder, "wrong.key")
        with cluster.Pool(nodes=2, key=right) as pool:
            works(pool)
            for env in ({"FIRSTLIGHT_KEY_FILE": wrong}, {"FIRSTLIGHT_KEY_FILE": ""}):
                error = pool.run("status", env=env).error()
                assert "key" in error, error
            with connect(pool.address) as stranger:
                stranger.sendall(struct.pack("<I", 4) + b"\x08\x01\x10\x01")
                assert closed_by_peer(stranger, 10), "a request without the key was read"
            for arguments in (["--key-file", wrong], []):
                intruder = pool.start(f"intruder{len(arguments)}", [*pool.node_line("box9"), "--join", pool.join, *arguments])
                cluster.wait_until(lambda: not intruder.alive(), 20, "a node with no right key gives up")
                assert intruder.popen.returncode == 1 and "key" in intruder.log(), intruder.log()
                assert intruder.log().count("\n") == 1, intruder.log()
            assert pool.ready() == ["box1", "box2"]
            works(pool)


def knocks_are_counted_not_listed():
    with tempfile.TemporaryDirectory() as folder, cluster.Pool(nodes=0, key=key_file(folder, "right.key")) as pool:
        def refusals():
            return [line for line in pool.coordinator.log().splitlines() if "turned away" in line]
        for _ in range(30):
            with connect(pool.join) as stranger:
                stranger.sendall(struct.pack("<H", 41) + b"\x07flh" + bytes([1, 0, 1, 2]) + os.urandom(32) + b"\0")
                assert closed_by_peer(stranger, 10)
        assert len(refusals()) == 1, refusals()
        cluster.wait_until(lambda: len(refusals()) == 2, 20, "the rest is counted")
        assert "29 more" in refusals()[1], refusals()


def other_addresses_need_a_key():
    for program, arguments in (("firstlight-coordinator", ["--listen", "0.0.0.0:0"]),
                               ("firstlight-coordinator", ["--client-listen", "0.0.0.0:0"]),
                               ("firstlight-node", ["--join", "127.0.0.1:1", "--listen", "0.0.0.0:0"])):
        done = subprocess.run([cluster.program(program), *arguments], capture_output=True, text=True, timeout=20,
                              check=False)
        assert done.returncode != 0, f"{program} {arguments} listens without a key"
        assert "key" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def odd_files_in_the_models_folder_hide_no_other():
    with tempfile.TemporaryDirectory() as folder:
        made = [cluster.program("mkmodel"), "--layers", "1", "--width", "64", "--heads", "2", "--kv-heads", "1", "--ffn",
                "96", "--vocab", "600", "--type", "Q8_0", "--out", os.path.join(folder, "good.gguf")]
        subprocess.run(made, check=True)
        for name in (b"latin\xff1.gguf", b"red\x1b[31m.gguf", b"two\nlines.gguf", b"no-model.gguf", b".gguf"):
            with open(os.path.join(os.fsencode(folder), name), "wb") as file:
                file.write(b"GGUF\xff\xfe")
        os.mkdir(os.path.join(folder, "folder.gguf"))
        os.mkfifo(os.path.join(folder, "pipe.gguf"))
        with cluster.Pool(nodes=0, models=folder) as pool:
            listed = pool.run("models")
            assert listed.status == 0, listed.err
            assert "good" in listed.out and "no-model" in listed.out and "latin" not in listed.out, listed.out
            assert "good" in pool.generate("better", "--prompt", "x").error()


def wrong_addresses_cost_one_line():
    for program, arguments in (("firstlight-coordinator", ["--listen", "x"]),
                               ("firstlight-coordinator", ["--listen", "127.0.0.1:99999"]),
                               ("firstlight-coordinator", ["--listen", "no.such.host.invalid:0"]),
                               ("firstlight-coordinator", ["--client-listen", "unix:/nonexistent/a"]),
                               ("firstlight-node", ["--join", "127.0.0.1:0"]),
                               ("firstlight-node", ["--join", "unix:/tmp/x"]),
                               ("firstlight-node", ["--join", "127.0.0.1:1", "--listen", "x"])):
        more = ["--client-listen", "127.0.0.1:0"] if arguments[0] == "--listen" and "coord" in program else []
        done = subprocess.run([cluster.program(program), *more, *arguments], capture_output=True, text=True, timeout=20,
                              check=False)
        assert done.returncode in (1, 2), (program, arguments, done)
        assert done.stderr.count("\n") == 1, done.stderr
        assert "key" not in done.stderr, f"{arguments}: a key would not help: {done.stderr}"


def a_name_that_does_not_resolve_is_said_once():
    with cluster.Pool(nodes=0) as pool:
        lost = pool.start("lost", [*pool.node_line("lost"), "--join", "no.such.host.invalid:7412"])
        cluster.wait_until(lambda: "does not resolve" in lost.log(), 20, "the node says what is wrong")
        time.sleep(5)  # two more tries
        assert lost.alive() and lost.log().count("\n") == 1, lost.log()
        assert lost.stop() == 0


if __name__ == "__main__":
    cluster.main([garbage_on_the_client_port, half_frame_then_silence, garbage_on_the_node_port, many_silent_clients,
                  client_that_vanishes_frees_the_cluster, wrong_and_missing_keys_are_refused,
                  knocks_are_counted_not_listed, other_addresses_need_a_key, odd_files_in_the_models_folder_hide_no_other,
                  wrong_addresses_cost_one_line,
                  a_name_that_does_not_resolve_is_said_once])
