#!/usr/bin/env python3
"""Nodes without the model file: they fetch their ranges, keep them, and never use a bad copy."""
import glob
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

MODEL = cluster.SMOLLM2
PROMPT = ["--prompt", "The capital of France is", "--max-tokens", "8", "--top-logits", "5"]


def facts(answer):
    return answer["tokens"], answer["top_logits"]


def reference():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=1) as pool:
        return facts(pool.generate(MODEL, *PROMPT).json())


def cache_files(pool, name):
    return glob.glob(pool.path(f"cache-{name}") + "/*/*.piece")


def wait_for_entries(pool):
    # The first token waits neither for the embedding table nor for what is written to the caches.
    pieces = sum(stage["pieces_total"] for stage in pool.status()["loaded"][0]["stages"])
    cluster.wait_until(lambda: sum(len(cache_files(pool, name)) for name in pool.nodes) == pieces, 20,
                       "every piece is kept")


def restart_node(pool, name):
    assert pool.nodes[name].stop() == 0
    pool.start_node(name)
    pool.wait_for(len(pool.nodes))
    pool.run("unload", "--model", MODEL)


def fetches_once_then_reads_its_cache():
    want = reference()
    with cluster.Pool(nodes=3, fetch=True) as pool:
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want
        wait_for_entries(pool)
        kept = {name: sum(map(os.path.getsize, cache_files(pool, name))) for name in pool.nodes}
        whole = os.path.getsize(os.path.join(cluster.MODELS, MODEL + ".gguf"))
        assert all(0 < size < 0.75 * whole for size in kept.values()), f"{kept} of {whole}: each keeps its own part"
        times = {path: os.stat(path).st_ino for name in pool.nodes for path in cache_files(pool, name)}
        for name in list(pool.nodes):
            restart_node(pool, name)
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want
        again = {path: os.stat(path).st_ino for name in pool.nodes for path in cache_files(pool, name)}
        assert times == again, f"the second start wrote entries again: {set(times.items()) ^ set(again.items())}"


def corrupted_entry_is_dropped_and_fetched_again():
    want = reference()
    with cluster.Pool(nodes=2, fetch=True) as pool:
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want
        wait_for_entries(pool)
        entries = sorted(cache_files(pool, "box1"), key=os.path.getsize)
        for path, damage in ((entries[-1], "flip"), (entries[-2], "cut"), (entries[-3], "empty")):
            with open(path, "r+b") as entry:
                if damage == "flip":
                    entry.seek(os.path.getsize(path) // 2)
                    byte = entry.read(1)
                    entry.seek(-1, os.SEEK_CUR)
                    entry.write(bytes([byte[0] ^ 1]))
                else:
                    entry.truncate(os.path.getsize(path) // 2 if damage == "cut" else 0)
        restart_node(pool, "box1")
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want
        # Whole again: a third start finds nothing to complain about.
        restart_node(pool, "box1")
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want


def a_file_replaced_while_it_is_fetched_spoils_no_cache():
    want = reference()
    source = os.path.join(cluster.MODELS, MODEL + ".gguf")
    with tempfile.TemporaryDirectory() as folder, cluster.Pool(nodes=2, models=folder, fetch=True) as pool:
        mine, other = os.path.join(folder, MODEL + ".gguf"), os.path.join(folder, "other")
        shutil.copy(source, mine)
        running = pool.client("generate", "--model", MODEL, *PROMPT)
        cluster.wait_until(lambda: cache_files(pool, "box1") or running.poll() is not None, 30, "a piece is fetched")
        with open(source, "rb") as file, open(other, "wb") as changed:
            changed.write(bytes(byte ^ 1 for byte in file.read(1 << 20)) + file.read())
        os.rename(other, mine)
        running.communicate(timeout=60)
        pool.run("unload", "--model", MODEL)  # when it was quick enough to be loaded
        assert "GGUF" in pool.generate(MODEL, *PROMPT).error()
        shutil.copy(source, mine)
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want


def mounted(pool, size):
    """A tmpfs of its own for box1's cache; needs root."""
    if os.geteuid() != 0:
        raise cluster.Skip("mounting a small file system needs root")
    folder = pool.path("cache-box1")
    os.makedirs(folder, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False,
                          capture_output=True, text=True)
    if done.returncode != 0:
        raise cluster.Skip(f"tmpfs cannot be mounted: {done.stderr.strip()}")
    return folder


def full_cache_disk_does_not_stop_the_load():
    want = reference()
    with cluster.Pool(nodes=0, fetch=True) as pool:
        folder = mounted(pool, "4m")
        try:
            node = pool.start_node("box1")
            pool.wait_for(1)
            assert facts(pool.generate(MODEL, *PROMPT).json()) == want
            assert node.alive()
            assert node.stop() == 0
        finally:
            subprocess.run(["umount", folder], check=True)


def read_only_cache_disk_does_not_stop_the_load():
    want = reference()
    with cluster.Pool(nodes=0, fetch=True) as pool:
        folder = mounted(pool, "1m")
        try:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            node = pool.start_node("box1")
            pool.wait_for(1)
            assert facts(pool.generate(MODEL, *PROMPT).json()) == want
            assert node.stop() == 0
        finally:
            subprocess.run(["umount", folder], check=True)


def coordinator_dies_during_a_fetch():
    want = reference()
    with cluster.Pool(nodes=2, fetch=True) as pool:
        running = pool.client("generate", "--model", MODEL, "--json", *PROMPT)
        cluster.wait_until(lambda: cache_files(pool, "box1") or cache_files(pool, "box2"), 20, "something is fetched")
        pool.coordinator.kill()
        _, err = running.communicate(timeout=30)
        assert running.returncode == 1 and err.decode().count("\n") == 1, err.decode()
        pool.start_coordinator()
        pool.wait_for(2)
        assert facts(pool.generate(MODEL, *PROMPT).json()) == want


if __name__ == "__main__":
    cluster.main([fetches_once_then_reads_its_cache, corrupted_entry_is_dropped_and_fetched_again,
                  a_file_replaced_while_it_is_fetched_spoils_no_cache,
                  full_cache_disk_does_not_stop_the_load, read_only_cache_disk_does_not_stop_the_load,
                  coordinator_dies_during_a_fetch])
