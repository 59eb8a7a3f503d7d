#!/usr/bin/env python3
"""Where the time to a first token went, of a real cluster: chain, classes, what is kept."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool as cluster  # noqa: E402

MODEL = cluster.SMOLLM2
LOADER = ("read", "verify", "repack", "copy")


def timeline(pool, *arguments):
    return pool.run("timeline", *arguments, "--json").json()


def check_chain(got):
    """Without a gap from t0 to the first token, and nothing unknown when nothing is missing."""
    assert got["complete"], got["nodes"]
    at = 0
    for part in got["exposed"]:
        assert abs(part["start_ms"] - at) < 1e-5 and part["ms"] > 0, part
        assert part["phase"] != "unknown", got["exposed"]
        at = part["start_ms"] + part["ms"]
    assert abs(at - got["ttft_ms"]) < 1e-4, (at, got["ttft_ms"])
    assert got["exposed"][-1]["phase"] == "return"
    for phase in got["phases"]:
        exposed = sum(part["ms"] for part in got["exposed"] if part["phase"] == phase["phase"])
        assert abs(exposed - phase["exposed_ms"]) < 1e-3, phase


def forget(model):
    """The model's file leaves the page cache, but for what others map."""
    file = os.open(os.path.join(cluster.MODELS, model + ".gguf"), os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def remember(model):
    with open(os.path.join(cluster.MODELS, model + ".gguf"), "rb") as file:
        while file.read(1 << 20):
            pass


def first_answer(pool, *arguments):
    answer = pool.generate(MODEL, "--prompt", "The quick brown fox jumps over the lazy dog. " * 10, "--max-tokens", "2",
                           *arguments).json()
    got = timeline(pool)
    assert got["class"] == answer["class"] and abs(got["ttft_ms"] - answer["ttft_ms"]) < 1e-5
    check_chain(got)
    return got


def found_share(got):
    shard = sum(node["shard_bytes"] for node in got["nodes"])
    return sum(node["page_cache_before"] * node["shard_bytes"] for node in got["nodes"]) / shard


def classes_are_what_was_found():
    cluster.need_model(MODEL)
    for prepare in (remember, forget):
        with cluster.Pool(nodes=3) as pool:
            prepare(MODEL)
            first = first_answer(pool)
            assert len(first["nodes"]) == 3
            if all(node["page_cache_before"] is not None for node in first["nodes"]):
                share = found_share(first)
                assert first["class"] == ("cold" if share < 0.01 else "partial"), (share, first["class"])
                assert prepare is not remember or share > 0.9, share
            loaded = sum(phase["exposed_ms"] + phase["hidden_ms"] for phase in first["phases"] if phase["phase"] in LOADER)
            assert loaded > 0, first["phases"]
            warm = first_answer(pool)
            assert warm["class"] == "warm"
            assert not [part for part in warm["exposed"] if part["phase"] in LOADER], warm["exposed"]


def without_overlap_nothing_is_hidden_behind_loading():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2, coordinator=["--no-overlap"]) as pool:
        got = first_answer(pool)
        for node in got["nodes"]:
            spans = [span for span in got["spans"] if span["node"] == node["node"]]
            ends = [span["end_ms"] for span in spans if span["phase"] in LOADER]
            begins = [span["start_ms"] for span in spans if span["phase"] == "prefill"]
            assert ends and begins and max(ends) <= min(begins), (node["node"], max(ends), min(begins))
        assert [part for part in got["exposed"] if part["phase"] in LOADER], got["exposed"]


def the_last_ones_are_kept_and_no_more_memory_is_taken():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=1) as pool:
        error = pool.run("timeline", "--json").error()
        assert "no request has got a token" in error, error
        first = first_answer(pool)
        memory = 0
        for number in range(80):
            answer = pool.generate(MODEL, "--tokens", f"{10 + number}", "--max-tokens", "1").json()
            assert answer["phases"], answer
            memory = pool.coordinator.memory() if number == 66 else memory
        last = timeline(pool)
        assert timeline(pool, str(last["id"]))["ttft_ms"] == last["ttft_ms"]
        error = pool.run("timeline", str(first["id"]), "--json").error()
        assert f"id {first['id']}" in error and f"to {last['id']}" in error, error
        grown = pool.coordinator.memory() - memory
        assert grown < 2 << 20, grown
        log = [line for line in pool.coordinator.log().splitlines() if " finish " in line]
        assert len(log) == 81 and all("class warm" in line and "ttft" in line for line in log[1:]), log[:3]


if __name__ == "__main__":
    cluster.main([classes_are_what_was_found, without_overlap_nothing_is_hidden_behind_loading,
                  the_last_ones_are_kept_and_no_more_memory_is_taken])
