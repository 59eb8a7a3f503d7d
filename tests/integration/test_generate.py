#!/usr/bin/env python3
"""What a user asks and gets: reference tokens, stop strings, conversations, limits, one-line errors."""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

MODEL = cluster.SMOLLM2


def flags(record):
    return ["--prompt", record["prompt"], *(["--special"] if record["parse_special"] else []),
            *([] if record["add_special"] else ["--no-bos"])]


def reference_tokens_from_text_to_text():
    """Float activations over three nodes: every safe record's first 16 tokens, its text, and its logits."""
    for name, model, limit, longest in (("smollm2", cluster.SMOLLM2, 0.001, 100), ("gemma3", cluster.GEMMA3, 0.02, 50)):
        cluster.need_model(model)
        with cluster.Pool(nodes=3, coordinator=["--activations", "f32"]) as pool:
            for record in cluster.golden(name):
                if not record["safe16"] or record["n_prompt"] > longest or "\0" in record["prompt"]:
                    continue
                answer = pool.generate(model, *flags(record), "--max-tokens", "16", "--top-logits", "10").json()
                assert answer["prompt_tokens"] == record["n_prompt"], (record["id"], answer)
                end = len(record["greedy"]) - 1 if record["stopped"] else len(record["greedy"])
                want = record["greedy"][:min(16, end)]
                assert answer["tokens"][:len(want)] == want, (record["id"], answer["tokens"], want)
                assert record["greedy_text"].startswith(answer["text"].rstrip("\ufffd")), (record["id"], answer["text"])
                logits = dict(map(tuple, answer["top_logits"]))
                for token, value in record["top"][:5]:
                    assert abs(logits[token] - value) <= limit, (record["id"], token, value, logits[token])


def stops_and_classes():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        first = pool.generate(MODEL, "--prompt", "1, 2, 3, 4,", "--max-tokens", "20").json()
        # Not in the nodes' memory; what of the file is in the page cache depends on who read it before.
        assert first["class"] in ("cold", "partial"), first["class"]
        assert first["finish"] == "length" and len(first["tokens"]) == 20
        assert first["ttft_ms"] > 0 and first["decode_tok_s"] > 0
        again = pool.generate(MODEL, "--prompt", "1, 2, 3, 4,", "--max-tokens", "20").json()
        assert again["class"] == "warm" and again["tokens"] == first["tokens"] and again["text"] == first["text"]
        word = first["text"][5:9]
        stopped = pool.generate(MODEL, "--prompt", "1, 2, 3, 4,", "--max-tokens", "20", "--stop", word).json()
        assert stopped["finish"] == "stop" and stopped["text"] == first["text"][:first["text"].index(word)]
        ended = next(record for record in cluster.golden("smollm2") if record["stopped"] and record["safe16"])
        answer = pool.generate(MODEL, *flags(ended), "--max-tokens", "64").json()
        assert answer["finish"] == "stop" and answer["tokens"] == ended["greedy"][:-1], answer
        assert answer["text"] == ended["greedy_text"]


def sampling_repeats_by_its_seed():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        def draw(seed, *more):
            return pool.generate(MODEL, "--prompt", "Once upon a time", "--max-tokens", "16", "--temperature", "1",
                                 "--seed", seed, *more).json()["tokens"]
        assert draw("1") == draw("1")
        assert len({tuple(draw(str(seed))) for seed in range(4)}) > 1
        assert draw("5", "--top-k", "1") == draw("6", "--top-k", "1")


def a_conversation_keeps_its_cache():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        prompt = cluster.golden("smollm2")[-1]["prompt_tokens"][:200]
        first = pool.generate(MODEL, "--tokens", cluster.tokens_text(prompt), "--max-tokens", "10", "--ignore-end").json()
        assert first["cached_tokens"] == 0
        longer = prompt + first["tokens"] + prompt[:5]
        second = pool.generate(MODEL, "--tokens", cluster.tokens_text(longer), "--max-tokens", "10", "--ignore-end",
                               "--top-logits", "5").json()
        assert second["cached_tokens"] >= 200, second
        # Edited near its end; a prompt that shares less than half counts as another conversation.
        edited = prompt[:150] + [5] + longer[151:]
        third = pool.generate(MODEL, "--tokens", cluster.tokens_text(edited), "--max-tokens", "10", "--ignore-end",
                              "--top-logits", "5").json()
        assert 128 <= third["cached_tokens"] <= 150, third
        kept = pool.status()["loaded"][0]["sequences_kept"]
        assert kept >= 1
        pool.run("unload", "--model", MODEL)
        for tokens, cached in ((longer, second), (edited, third)):
            fresh = pool.generate(MODEL, "--tokens", cluster.tokens_text(tokens), "--max-tokens", "10", "--ignore-end",
                                  "--top-logits", "5").json()
            assert fresh["tokens"] == cached["tokens"] and fresh["top_logits"] == cached["top_logits"]
            pool.run("unload", "--model", MODEL)


def chat_over_several_turns():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        done = pool.run("chat", "--model", MODEL, "--temperature", "0", "--max-tokens", "24",
                        stdin=b"My name is Ada.\nWhat is my name?\n/exit\n")
        assert done.status == 0 and "Ada" in done.out, (done.out, done.err)


def limits_say_the_number():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=1, coordinator=["--context", "64"]) as pool:
        fits = cluster.golden("smollm2")[-1]["prompt_tokens"]
        error = pool.generate(MODEL, "--tokens", cluster.tokens_text(fits[:65]), "--max-tokens", "1").error()
        assert "65" in error and "64" in error, error
        # The context filled to its last position.
        answer = pool.generate(MODEL, "--tokens", cluster.tokens_text(fits[:63]), "--ignore-end").json()
        assert len(answer["tokens"]) == 1 and answer["finish"] == "length", answer
        error = pool.generate(MODEL, "--tokens", cluster.tokens_text(fits[:64]), "--max-tokens", "1").error()
        assert "64" in error and "63" in error, error
        full = pool.generate(MODEL, "--tokens", cluster.tokens_text(fits[:32]), "--max-tokens", "32", "--ignore-end").json()
        assert len(full["tokens"]) == 32
    with cluster.Pool(nodes=2, node=["--memory", "40MiB"]) as pool:
        error = pool.generate(MODEL, "--prompt", "x", "--max-tokens", "1").error()
        assert "MiB" in error and "box" in error, error
        assert pool.ready() == ["box1", "box2"]


def wrong_requests_get_one_line():
    cluster.need_model(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(os.path.join(cluster.MODELS, MODEL + ".gguf"), os.path.join(folder, "good.gguf"))
        with open(os.path.join(cluster.MODELS, MODEL + ".gguf"), "rb") as good:
            head = good.read(4 << 20)
        for name, data in (("empty", b""), ("foreign", b"\x89PNG\r\n\x1a\n" * 100), ("cut", head),
                           ("header", head[:1000]), ("version", head[:4] + b"\x09\0\0\0" + head[8:])):
            with open(os.path.join(folder, name + ".gguf"), "wb") as file:
                file.write(data)
        with cluster.Pool(nodes=1, models=folder) as pool:
            for name in ("missing", "empty", "foreign", "cut", "header", "version", "../good", ""):
                error = pool.generate(name, "--prompt", "x").error()
                assert name in error or not name, (name, error)
            listed = {model["name"]: model for model in pool.run("models", "--json").json()["models"]}
            assert not listed["good"].get("problem") and listed["cut"]["problem"], listed
            for arguments in (["generate"], ["generate", "--model", "good"], ["generate", "--nonsense"], ["nonsense"],
                              ["generate", "--model", "good", "--tokens", "1,x"],
                              ["generate", "--model", "good", "--tokens", "99999999"],
                              ["generate", "--model", "good", "--prompt", "x", "--tokens", "1"],
                              ["generate", "--model", "good", "--prompt", "x", "--max-tokens", "-1"],
                              ["generate", "--model", "good", "--prompt", "x", "--temperature", "nan"],
                              ["generate", "--model", "good", "--prompt", "x", "--top-p", "7"],
                              ["generate", "--model", "good", "--prompt", "x", "--template", "nonsense", "--chat"],
                              ["generate", "--model", "good", "--prompt-file", "/nonexistent"],
                              ["unload", "--model", "never-loaded"], ["plan", "--model", "missing"],
                              ["load", "--model", "missing"], ["tokenize", "--model", "missing"]):
                pool.run(*arguments).error()
            assert "UTF-8" in pool.run("tokenize", "--model", "good", stdin=b"ab\xff\xfe").error()
            bad_prompt = os.path.join(folder, "prompt.txt")
            with open(bad_prompt, "wb") as file:
                file.write(b"caf\xe9")
            assert "UTF-8" in pool.generate("good", "--prompt-file", bad_prompt).error()
            assert len(pool.generate("good", "--prompt", "Hello", "--max-tokens", "3").json()["tokens"]) == 3


def tokenize_agrees_with_the_reference():
    for name, model in (("tokens_smollm2", cluster.SMOLLM2), ("tokens_gemma3", cluster.GEMMA3)):
        cluster.need_model(model)
        with cluster.Pool(nodes=1) as pool:
            for record in cluster.golden(name)[::12]:
                arguments = ["tokenize", "--model", model, "--json", *(["--special"] if record["parse_special"] else []),
                             *([] if record["add_special"] else ["--no-bos"])]
                got = pool.run(*arguments, stdin=record["text"].encode()).json()["ids"]
                assert got == record["ids"], (record["id"], got)


def configuration_files():
    with tempfile.TemporaryDirectory() as folder:
        for text in ("", "{", "[]", '{"coordinator": {"contexts": 1}}', '{"coordinator": {"context": "many"}}',
                     '{"coordinator": {"context": -5}}', '{"coordinator": {"listen": "nonsense"}}',
                     '{"coordinator": {"context": 1, "context": 2}}', "\0\1\2"):
            path = os.path.join(folder, "pool.json")
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            done = subprocess.run([cluster.program("firstlight-coordinator"), "--config", path], capture_output=True,
                                  text=True, timeout=20, check=False)
            assert done.returncode != 0 and done.stderr.count("\n") == 1, (text, done.returncode, done.stderr)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"coordinator": {"context": 64, "models": cluster.MODELS}}, file)
        with cluster.Pool(nodes=1, coordinator=["--config", path]) as pool:
            cluster.need_model(MODEL)
            assert pool.run("plan", "--model", MODEL, "--json").json()["context"] == 64


if __name__ == "__main__":
    cluster.main([reference_tokens_from_text_to_text, stops_and_classes, sampling_repeats_by_its_seed,
                  a_conversation_keeps_its_cache, chat_over_several_turns, limits_say_the_number,
                  wrong_requests_get_one_line, tokenize_agrees_with_the_reference, configuration_files])
