#!/usr/bin/env python3
"""A model cut by hand, loaded before or beside computing: the stages that were asked for, and the same answer."""
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

ASK = ("--prompt", "the tide comes in and the light goes round", "--max-tokens", "8", "--ignore-end", "--top-logits", "4")


class Models:
    """A folder with a model of six layers."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="firstlight-split.")
        subprocess.run([cluster.program("mkmodel"), "--layers", "6", "--width", "128", "--heads", "4", "--kv-heads", "2",
                        "--ffn", "256", "--vocab", "1000", "--out", os.path.join(self.path, "six.gguf")], check=True)
        return self.path

    def __exit__(self, kind, value, trace):
        shutil.rmtree(self.path)


def answer(models, *flags, nodes=3):
    """(tokens and logits, layers of each stage by node)."""
    with cluster.Pool(nodes=nodes, models=models, coordinator=flags) as pool:
        got = pool.generate("six", *ASK).json()
        layers = [(stage["node"], stage["last_layer"] - stage["first_layer"] + 1) for stage in got["stages"]]
        return (got["tokens"], got["top_logits"]), layers


def every_split_gives_the_same_answer():
    with Models() as models:
        alone, _ = answer(models, nodes=1)
        assert len(alone[0]) == 8 and len(alone[1]) == 4, alone
        for split, want in (("2,2,2", [2, 2, 2]), ("4,1,1", [4, 1, 1]), ("1,1,4", [1, 1, 4])):
            for more in ([], ["--no-overlap"]):
                got, layers = answer(models, "--split", split, *more)
                assert [count for _, count in layers] == want, (split, layers)
                assert got == alone, (split, more, got, alone)


def a_node_may_get_nothing():
    with Models() as models:
        _, layers = answer(models, "--split", "5,0,1")
        assert layers == [("box1", 5), ("box3", 1)], layers
        _, layers = answer(models, "--split", "2,4")
        assert layers == [("box1", 2), ("box2", 4)], layers


def a_split_that_does_not_suit_is_told_and_the_cluster_stays():
    with Models() as models:
        with cluster.Pool(nodes=2, models=models, coordinator=["--split", "3,4"]) as pool:
            for _ in range(2):
                sentence = pool.generate("six", *ASK).error()
                assert "7 layers" in sentence and "six has 6" in sentence, sentence
            assert pool.ready() == ["box1", "box2"]
        with cluster.Pool(nodes=2, models=models, coordinator=["--split", "2,2,2"]) as pool:
            sentence = pool.generate("six", *ASK).error()
            assert "3 and 2 nodes have joined" in sentence, sentence
            pool.start_node("box3")
            pool.wait_for(3)
            assert len(pool.generate("six", *ASK).json()["stages"]) == 3


def what_is_no_split_ends_the_coordinator():
    for bad in ("", "0,0", "6,,5", "6,5,", "a", "-1", "2.5", "6 5", "513", "99999999999999999999", ",".join("1" * 65)):
        done = subprocess.run([cluster.program("firstlight-coordinator"), "--listen", "127.0.0.1:0", "--client-listen",
                               "127.0.0.1:0", "--split", bad], capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode not in (0, 77) and "--split" in done.stderr, (bad, done)
        assert done.stderr.count("\n") == 1, done.stderr


if __name__ == "__main__":
    cluster.main([what_is_no_split_ends_the_coordinator, every_split_gives_the_same_answer, a_node_may_get_nothing,
                  a_split_that_does_not_suit_is_told_and_the_cluster_stays])
