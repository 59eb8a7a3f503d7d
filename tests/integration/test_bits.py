#!/usr/bin/env python3
"""The same request gives the same tokens and logits to the last bit, however the cluster is cut."""
import os
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

TOKENS = 24

# Prompts that cross the chunk (64), the KV block (32) and Gemma's window (512).
SMOLLM2_PROMPTS = [1, 18, 31, 32, 33, 64, 65, 130]
GEMMA3_PROMPTS = [2, 33, 513]


def prompts(model):
    name, lengths = {cluster.SMOLLM2: ("smollm2", SMOLLM2_PROMPTS), cluster.GEMMA3: ("gemma3", GEMMA3_PROMPTS)}[model]
    longest = cluster.longest_prompt(name)
    return [longest[:length] for length in lengths]


def ask(pool, model, prompt):
    answer = pool.generate(model, "--tokens", cluster.tokens_text(prompt), "--max-tokens", str(TOKENS), "--temperature",
                           "0", "--top-logits", "10", "--ignore-end").json()
    assert len(answer["tokens"]) == TOKENS, answer
    assert len(answer["top_logits"]) == 10, answer
    # Text of the JSON numbers would do; floats are printed so that they read back exactly.
    return answer["tokens"], answer["top_logits"]


def answers(model, count=None, **options):
    """Answers to the first `count` prompts (all) of a cluster made with the options."""
    with cluster.Pool(**options) as pool:
        stages = pool.generate(model, "--tokens", "1", "--max-tokens", "1").json()["stages"]
        wanted = options.get("nodes", 1)
        assert len(stages) == wanted, f"{len(stages)} stages on {wanted} nodes"
        return [ask(pool, model, prompt) for prompt in prompts(model)[:count]]


reference = {}


def reference_of(model):
    cluster.need_model(model)
    if model not in reference:
        reference[model] = answers(model, nodes=1)
    return reference[model]


def check(model, count=None, **options):
    want = reference_of(model)[:count]
    got = answers(model, count, **options)
    for prompt, one, other in zip(prompts(model), want, got):
        assert one == other, f"{options}: prompt of {len(prompt)} tokens: {one} became {other}"


def two_three_and_four_nodes():
    for nodes in (2, 3, 4):
        check(cluster.SMOLLM2, nodes=nodes)


def three_nodes_with_sliding_window():
    check(cluster.GEMMA3, nodes=3)


def three_nodes_under_mpirun():
    check(cluster.SMOLLM2, nodes=3, mpi=True)


def chunks_of_one_seven_and_two_hundred():
    for chunk in (1, 7, 200):
        check(cluster.SMOLLM2, nodes=2, coordinator=["--chunk", str(chunk)])


def scalar_code():
    check(cluster.SMOLLM2, 3, nodes=2, node=["--isa", "scalar"])


def avx2():
    if not cluster.cpu_has("avx2", "fma", "f16c"):
        raise cluster.Skip("this CPU has no AVX2")
    check(cluster.SMOLLM2, nodes=2, node=["--isa", "avx2"])


def avx512():
    if not cluster.cpu_has("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"):
        raise cluster.Skip("this CPU has no AVX-512 with VNNI; tests/kernels runs that code emulated")
    check(cluster.SMOLLM2, nodes=2, node=["--isa", "avx512"])


def without_overlap():
    check(cluster.SMOLLM2, nodes=3, coordinator=["--no-overlap"])


def eight_sessions_at_once():
    want = reference_of(cluster.SMOLLM2)
    with cluster.Pool(nodes=3) as pool, ThreadPoolExecutor(8) as clients:
        work = prompts(cluster.SMOLLM2)
        got = list(clients.map(lambda prompt: ask(pool, cluster.SMOLLM2, prompt), work * 2))
    assert got == want * 2


if __name__ == "__main__":
    cluster.main([two_three_and_four_nodes, three_nodes_with_sliding_window, three_nodes_under_mpirun,
                  chunks_of_one_seven_and_two_hundred, scalar_code, avx2, avx512, without_overlap,
                  eight_sessions_at_once])
