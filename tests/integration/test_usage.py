#!/usr/bin/env python3
"""How programs and scripts take being called: help on standard output and 0; a wrong call is one line on standard error
that names what is wrong, nothing on standard output, and 2; what the machine refuses is 1."""
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool as cluster

COORDINATOR, NODE, TOOL = (cluster.program(name) for name in ("firstlight-coordinator", "firstlight-node", "firstlight"))
COMMANDS = ("generate", "chat", "tokenize", "models", "plan", "load", "unload", "status", "timeline", "keygen")

# What a script is, a flag of it that takes a value (none: it has no such flag), a word that its help must have.
SCRIPTS = {
    "cluster/local": ("--nodes", "cluster/local --nodes"), "cluster/lab/lab": (None, "lab up FILE.json"),
    "cluster/lab/agent": (None, "mpirun"), "cluster/models": (None, "cluster/models smollm2"),
    "cluster/packages": (None, "cluster/packages run"), "cluster/quickstart": (None, "cluster/quickstart"),
    "tests/run": (None, "tests/run"), ".ci/run": (None, "tests/run"), "tests/bench/cold": ("--cell", "tests/bench/cold"),
    "tests/bench/lab": ("--seconds", "tests/bench/lab"), "tests/bench/mkmodel": ("--out", "mkmodel --out"),
    "tests/integration/avx512_machine": ("--machine", "--machine icelake"), "tests/bench/pool": ("--seconds", "tests/bench/pool"), "tests/bench/render": ("--json", "tests/bench/render"),
}

# Wrong calls, and a word of the sentence.  {folder} has what put_files() makes.
WRONG = (
    *((COORDINATOR, arguments, word) for arguments, word in (
        ("word", "word"), ("--no-overlap=3", "--no-overlap"), ("--context 0", "--context"), ("--context 3x", "--context"),
        ("--kv-budget much", "--kv-budget"), ("--sequences 0", "--sequences"), ("--queue -1", "--queue"),
        ("--chunk 0", "--chunk"), ("--log loud", "--log"), ("--split 0,0", "--split"), ("--activations q4", "--activations"),
        ("--template morse", "morse"), ("--data-ports 5", "--data-ports"), ("--listen nowhere", "nowhere"),
        ("--listen 127.0.0.1:99999", "99999"), ("--client-listen nowhere", "nowhere"),
        ("--listen 0.0.0.0:0 --client-listen 127.0.0.1:0", "key"), ("--client-listen 0.0.0.0:0", "key"),
        ("--models {folder}/file", "file"), ("--config {folder}/none", "none"), ("--config {folder}/key.json", "contxt"),
        ("--config {folder}/json.json", "json.json"), ("--config {folder}/value.json", "coordinator.chunk"))),
    *((NODE, arguments, word) for arguments, word in (
        ("", "--join"), ("word", "word"), ("--join x:1 --memory much", "--memory"), ("--join x:1 --threads 0", "--threads"),
        ("--join x:1 --log loud", "--log"), ("--join x:1 --name a/b", "--name"), ("--join no-such-box.invalid:1 --isa mmx", "mmx"),
        ("--join x:1 --data-ports 5", "--data-ports"), ("--join nowhere", "nowhere"),
        ("--join 127.0.0.1:1 --listen nowhere", "nowhere"), ("--join 127.0.0.1:1 --listen 0.0.0.0:0", "key"),
        ("--config {folder}/none", "none"), ("--config {folder}/key.json", "contxt"),
        ("--config {folder}/json.json", "json.json"))),
    *((TOOL, arguments, word) for arguments, word in (
        ("", "command"), ("stauts", "status"), ("status word", "word"), ("status --addr nowhere", "nowhere"),
        ("status --timeout soon", "--timeout"), ("generate", "--model"), ("generate --model m", "--prompt"),
        ("generate --model m --prompt x --temperature hot", "--temperature"), ("generate --model m --tokens 1,x", "--tokens"),
        ("generate --model m --prompt x --template chatml", "--chat"), ("chat", "--model"), ("chat --model m --json", "JSON"),
        ("tokenize", "--model"), ("plan", "model"), ("load a b", "'b'"), ("unload", "model"), ("models x", "'x'"),
        ("timeline x", "'x'"), ("keygen x", "'x'"))),
    *((script, arguments, word) for script, arguments, word in (
        ("cluster/local", "", "no COMMAND"), ("cluster/local", "--nodes 0 -- true", "1 to 99"),
        ("cluster/local", "--models /nowhere -- true", "/nowhere"), ("cluster/quickstart", "two words", "in quotes"),
        ("cluster/models", "gpt", "gpt"), ("cluster/packages", "all", "all"), ("cluster/packages", "", "run"),
        ("tests/run", "a b", "one pattern"), ("cluster/lab/lab", "", "command"), ("cluster/lab/lab", "up", "FILE.json"),
        ("cluster/lab/lab", "up --fast", "--fast"), ("cluster/lab/lab", "up {folder}/none", "none"),
        ("cluster/lab/lab", "up {folder}/key.json", "coordinator"), ("cluster/lab/lab", "up {folder}/json.json", "json.json"),
        ("cluster/lab/lab", "set box1 disk", "disk"), ("cluster/lab/lab", "set box1 disk=fast", "fast"),
        ("tests/bench/cold", "word", "word"), ("tests/bench/cold", "--cell 99", "99"), ("tests/bench/cold", "--repeat 0", "--repeat"),
        ("tests/bench/cold", "--json /nowhere/x", "--json"), ("tests/bench/lab", "--seconds x", "--seconds"),
        ("tests/bench/lab", "--only cpu", "cpu"), ("tests/bench/lab", "--json /nowhere/x", "--json"),
        ("tests/bench/lab", "{folder}/none", "none"), ("tests/bench/lab", "{folder}/key.json", "coordinator"),
        ("tests/bench/mkmodel", "", "--out"), ("tests/bench/mkmodel", "word", "word"),
        ("tests/bench/mkmodel", "--layers x --out {folder}/m", "--layers"), ("tests/bench/mkmodel", "--type Q9 --out {folder}/m", "Q9"),
        ("tests/bench/pool", "nothing", "nothing"), ("tests/bench/pool", "--pairs 1", "--pairs"),
        ("tests/bench/pool", "--json /nowhere/x", "--json"), ("tests/bench/render", "word", "word"),
        ("tests/bench/render", "--json {folder}/none", "none"))),
)

# Rightly called, but the machine or the pool does not let it: status 1.
REFUSED = (
    (COORDINATOR, "--client-listen unix:{folder}/none/socket", "none/socket"), (COORDINATOR, "--key-file {folder}/none", "none"),
    (NODE, "--join 127.0.0.1:1 --key-file {folder}/none", "none"), (TOOL, "status --addr unix:{folder}/none", "none"),
    (TOOL, "generate --model m --prompt-file {folder}/none", "none"), (TOOL, "keygen --out {folder}/none/key", "none/key"),
    ("cluster/lab/agent", "nowhere true", "nowhere"), ("tests/bench/mkmodel", "--out {folder}/none/model", "none/model"),
)


def call(folder, program, *arguments):
    path = os.path.join(cluster.ROOT, program)  # an absolute one stays what it is
    unset = {"FIRSTLIGHT_ADDR", "FIRSTLIGHT_KEY_FILE", "FIRSTLIGHT_LOG"}
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    return subprocess.run([path, *arguments], env={**environment, "TMPDIR": folder, "FIRSTLIGHT_BUILD": cluster.BUILD},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)


def expect_line(done, status, word):
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1) and word in done.stderr, (word, done)


def put_files(folder):
    for name, text in (("file", ""), ("key.json", '{"coordinator": {"contxt": 3}}'), ("json.json", "{"),
                       ("value.json", '{"coordinator": {"chunk": 0}}')):
        with open(os.path.join(folder, name), "w", encoding="ascii") as file:
            file.write(text)
    return sorted(os.listdir(folder))


def help_is_an_answer():
    with tempfile.TemporaryDirectory() as folder:
        for program, arguments, word in (
                (COORDINATOR, [], "--models DIR"), (NODE, [], "--join"), (TOOL, [], "generate"),
                *((TOOL, [command], "Examples") for command in COMMANDS),
                *((script, [], word) for script, (_, word) in SCRIPTS.items())):
            done = call(folder, program, *arguments, "--help")
            assert (done.returncode, done.stderr) == (0, "") and word in done.stdout, (program, arguments, done)
        for program in (COORDINATOR, NODE, TOOL):
            done = call(folder, program, "--version")
            assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(os.path.basename(program)), done
        assert os.listdir(folder) == []


def what_is_unknown_is_named():
    with tempfile.TemporaryDirectory() as folder:
        for program, arguments in ((COORDINATOR, []), (NODE, []), (NODE, ["--join", "x:1"]), (TOOL, []),
                                   *((TOOL, [command]) for command in COMMANDS),
                                   *((script, []) for script in SCRIPTS if script != "cluster/lab/agent")):
            expect_line(call(folder, program, *arguments, "--speed"), 2, "--speed")
        assert os.listdir(folder) == []


def a_value_that_is_missing_is_named():
    with tempfile.TemporaryDirectory() as folder:
        for program, arguments, flag in (
                (COORDINATOR, [], "--models"), (COORDINATOR, ["--no-overlap"], "--config"), (NODE, [], "--join"),
                (NODE, ["--join", "x:1"], "--config"), *((TOOL, [command], "--addr") for command in COMMANDS if command != "keygen"),
                (TOOL, ["keygen"], "--out"), *((script, [], flag) for script, (flag, _) in SCRIPTS.items() if flag)):
            expect_line(call(folder, program, *arguments, flag), 2, flag)
        assert os.listdir(folder) == []


def expect_lines(calls, status):
    with tempfile.TemporaryDirectory() as folder:
        there = put_files(folder)
        for program, arguments, word in calls:
            expect_line(call(folder, program, *arguments.format(folder=folder).split()), status, word)
        assert sorted(os.listdir(folder)) == there, os.listdir(folder)


def a_wrong_call_costs_one_sentence():
    expect_lines(WRONG, 2)


def what_the_machine_refuses_is_a_failure():
    expect_lines(REFUSED, 1)


if __name__ == "__main__":
    cluster.main([help_is_an_answer, what_is_unknown_is_named, a_value_that_is_missing_is_named, a_wrong_call_costs_one_sentence,
                  what_the_machine_refuses_is_a_failure])
