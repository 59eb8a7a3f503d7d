#!/usr/bin/python3
"""The firstlight tool against a scripted coordinator: output, exit status, Ctrl-C, errors."""
import json
import os
import pty
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool  # noqa: E402
from fake_coordinator import FakeCoordinator, client_protocol  # noqa: E402

TOOL = pool.program("firstlight")
pb = client_protocol()
ENV = {k: v for k, v in os.environ.items() if not k.startswith("FIRSTLIGHT_")}


def run(coordinator, *words, stdin=b"", env=None, **more):
    address = ["--addr", coordinator.address] if coordinator else []
    return subprocess.run([TOOL, *words, *address], input=stdin, capture_output=True,
                          timeout=60, env={**ENV, **(env or {})}, **more)


def check(condition, *shown):
    if not condition:
        raise AssertionError(" ".join(str(s) for s in shown))


def one_line(result, status, *words):
    """Failed with this status, nothing on stdout, and one line on stderr that names the words."""
    lines = result.stderr.decode().splitlines()
    check(result.returncode == status, "exit", result.returncode, result.stderr)
    check(result.stdout == b"", result.stdout)
    check(len(lines) == 1, lines)
    for word in words:
        check(word in lines[0], lines[0], "lacks", word)


STAGES = [pb.Stage(node="a", first_layer=0, last_layer=4), pb.Stage(node="b", first_layer=5, last_layer=9)]


def answer(connection, request):
    """Loads, says "Grüße\\0 €" in pieces, and is done."""
    connection.event(request, progress=pb.Progress(phase="queue", cause="1 request before it"))
    connection.event(request, progress=pb.Progress(phase="load", bytes_done=5, bytes_total=10))
    connection.event(request, admitted=pb.Admitted(response_class=pb.CLASS_COLD, prompt_tokens=3))
    top = [pb.Top(id=7, value=0.1), pb.Top(id=8, value=-1.5)]
    connection.event(request, text=pb.Text(text="Grü", tokens=[
        pb.TokenDetail(id=5, logprob=-0.1, top=top), pb.TokenDetail(id=6, logprob=-2)]))
    connection.event(request, text=pb.Text(text="ße\0 €\n\"\\", tokens=[pb.TokenDetail(id=9)]))
    connection.event(request, text=pb.Text(text="", tokens=[pb.TokenDetail(id=2)]))
    connection.event(request, done=pb.Done(
        finish=pb.FINISH_STOP, response_class=pb.CLASS_COLD, prompt_tokens=3, cached_tokens=1,
        output_tokens=4, ttft_ms=12.5, decode_tok_s=33.25, stages=STAGES, timeline_id=17, predicted_ms=11,
        phases=[pb.Phase(phase="read", exposed_ms=10, hidden_ms=3, bytes=4096),
                pb.Phase(phase="prefill", exposed_ms=2.5)],
        logits=[pb.Top(id=1, value=0.1), pb.Top(id=2, value=1e-8)]))


def test_generate_json():
    coordinator = FakeCoordinator(pb, answer)
    result = run(coordinator, "generate", "--model", "m", "--prompt", "Hi", "--json",
                 "--logprobs", "2", "--top-logits", "2")
    check(result.returncode == 0, result.stderr)
    got = json.loads(result.stdout)
    check(got["tokens"] == [5, 6, 9, 2], got)
    check(got["text"] == "Grüße\0 €\n\"\\", got)
    check(got["prompt_tokens"] == 3 and got["cached_tokens"] == 1, got)
    check(got["class"] == "cold" and got["finish"] == "stop", got)
    check(got["ttft_ms"] == 12.5 and got["decode_tok_s"] == 33.25, got)
    check([(s["node"], s["first_layer"], s["last_layer"]) for s in got["stages"]]
          == [("a", 0, 4), ("b", 5, 9)], got)
    check(got["timeline_id"] == 17 and got["predicted_ms"] == 11, got)
    check(got["phases"][0] == {"phase": "read", "exposed_ms": 10, "hidden_ms": 3, "bytes": 4096}, got)
    check(sum(p["exposed_ms"] for p in got["phases"]) == got["ttft_ms"], got)
    # Single precision survives: 0.1 as the nearest float.
    check(got["top_logits"] == [[1, 0.100000001], [2, 9.99999994e-09]], got)
    check(got["logprobs"][0]["top"] == [[7, 0.100000001], [8, -1.5]], got)
    check(result.stderr == b"", result.stderr)


def test_generate_text():
    coordinator = FakeCoordinator(pb, answer)
    result = run(coordinator, "generate", "--model", "m", "--prompt", "Hi")
    check(result.stdout == "Grüße\0 €\n\"\\\n".encode(), result.stdout)
    check(b"[cold, 3 prompt tokens (1 from the cache), first token after 12.5 ms (predicted 11.0 ms): "
          b"read 10.0 ms, prefill 2.5 ms; 4 tokens at 33.2/s, stop, 2 stages; firstlight timeline 17]"
          in result.stderr, result.stderr)
    check(run(coordinator, "generate", "--model", "m", "--prompt", "Hi", "--quiet").stderr == b"",
          "--quiet is not")


def test_generate_request():
    coordinator = FakeCoordinator(pb, answer)
    run(coordinator, "generate", "--model", "m.Q4", "--prompt", "", "--special", "--no-bos",
        "--max-tokens", "7", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p=0.05",
        "--repetition-penalty", "1.1", "--penalty-window", "64", "--seed", "18446744073709551615",
        "--stop", "\n\n", "--stop", "User:", "--ignore-end")
    got = coordinator.requests[0]
    check(got.version == 1 and got.generate.model == "m.Q4", got)
    check(got.generate.WhichOneof("given") == "prompt" and got.generate.prompt == "", got)
    check(got.generate.special and got.generate.no_bos and got.generate.ignore_end, got)
    sampling = got.generate.sampling
    check(got.generate.max_tokens == 7 and sampling.top_k == 4, got)
    check(sampling.temperature == 0.5 and abs(sampling.top_p - 0.9) < 1e-6, got)
    check(sampling.seed == 2**64 - 1 and sampling.penalty_window == 64, got)
    check(list(got.generate.stops) == ["\n\n", "User:"], got)
    run(coordinator, "generate", "--model", "m", "--tokens", "1,0,1048575")
    check(list(coordinator.requests[1].generate.tokens) == [1, 0, 1048575], coordinator.requests[1])
    run(coordinator, "generate", "--model", "m", "--chat", "--prompt", "Hi", "--template", "chatml")
    got = coordinator.requests[2].generate
    check([(m.role, m.content) for m in got.messages] == [("user", "Hi")], got)
    check(got.chat_template == "chatml" and got.WhichOneof("given") is None, got)
    run(coordinator, "generate", "--model", "m", "--prompt-file", "-", stdin="a\0é".encode())
    check(coordinator.requests[3].generate.prompt == "a\0é", coordinator.requests[3])


def test_errors():
    def script(connection, request):
        connection.event(request, error=pb.Error(code=27, text="busy: the queue\nis full", retry_ms=1500))
    coordinator = FakeCoordinator(pb, script)
    for command in (["generate", "--model", "m", "--prompt", "x"], ["status"], ["models"],
                    ["load", "m"], ["unload", "m"], ["plan", "m"]):
        one_line(run(coordinator, *command), 1, "busy: the queue?is full", "1.5 s")
    one_line(run(coordinator, "tokenize", "--model", "m", stdin=b"x"), 1, "busy")

    def at_once(connection, request):
        connection.event(request, error=pb.Error(code=40, text="box1 was lost; send it again", retry_ms=1))
    err = run(FakeCoordinator(pb, at_once), "models").stderr
    check(err == b"firstlight: error: box1 was lost; send it again\n", err)


def test_usage():
    for words, named in (
            ([], "command"), (["genrate"], "generate"), (["generate", "--modle", "m"], "--model"),
            (["generate", "--prompt", "x"], "--model"),
            (["generate", "--model", "m"], "--prompt"),
            (["generate", "--model", "m", "--prompt", "x", "--tokens", "1"], "exactly one"),
            (["generate", "--model", "m", "--tokens", "1,x"], "'x'"),
            (["generate", "--model", "m", "--tokens", "1,,2"], "--tokens"),
            (["generate", "--model", "m", "--tokens", ""], "--tokens"),
            (["generate", "--model", "m", "--prompt", "x", "--top-p", "2"], "--top-p 2"),
            (["generate", "--model", "m", "--prompt", "x", "--temperature", "nan"], "--temperature"),
            (["generate", "--model", "m", "--prompt", "x", "--max-tokens", "-1"], "--max-tokens -1"),
            (["generate", "--model", "m", "--prompt", "x", "--max-tokens", "4294967296"], "--max-tokens"),
            (["generate", "--model", "m", "--prompt", "x", "--max-tokens"], "--max-tokens N"),
            (["generate", "--model", "m", "--prompt", "x", "--json=1"], "--json"),
            (["generate", "--model", "m", "--prompt", "x", "--stop", ""], "--stop"),
            (["generate", "--model", "m", "--prompt", "x", "--logprobs", "2"], "--json"),
            (["generate", "--model", "m", "--prompt", b"a\xff"], "UTF-8 at byte 1"),
            (["generate", "m"], "'m'"), (["load"], "one model"), (["plan", "a", "b"], "'b'"),
            (["chat", "--model", "m", "--json"], "--json"), (["tokenize"], "--model"),
            (["keygen", "--force"], "--force"), (["status", "--bogus"], "--bogus")):
        one_line(run(None, *words), 2, named)
    for words in (["--help"], ["generate", "--help"], ["chat", "-h"], ["tokenize", "--help"],
                  ["models", "--help"], ["plan", "--help"], ["load", "--help"], ["unload", "--help"],
                  ["status", "--help"], ["keygen", "--help"]):
        result = run(None, *words)
        check(result.returncode == 0 and b"Examples\n  " in result.stdout, words, result)
    check(run(None, "--version").stdout.startswith(b"firstlight "), "--version")


def test_bad_servers():
    one_line(run(None, "status", env={"FIRSTLIGHT_ADDR": "127.0.0.1:1"}), 1,
             "127.0.0.1:1", "firstlight-coordinator")
    garbage = FakeCoordinator(pb, lambda c, r: c.raw(b"\x05\0\0\0\xff\xff\xff\xff\xff"))
    one_line(run(garbage, "status"), 1, "not a message")
    long = FakeCoordinator(pb, lambda c, r: c.raw(b"HTTP/1.1 400 no\r\n"))
    one_line(run(long, "status"), 1, "a web server")
    closing = FakeCoordinator(pb, lambda c, r: "close")
    one_line(run(closing, "generate", "--model", "m", "--prompt", "x"), 1, "closed the connection")
    silent = FakeCoordinator(pb, lambda c, r: None)
    one_line(run(silent, "status", "--timeout", "1"), 1, "silent for 1 s")
    wrong = FakeCoordinator(pb, lambda c, r: c.event(r, tokens=pb.Tokens(ids=[1])))
    one_line(run(wrong, "status"), 1, "event")
    one_line(run(wrong, "generate", "--model", "m", "--prompt", "x"), 1, "event")


def interrupted(script, signals, *words):
    coordinator = FakeCoordinator(pb, script)
    process = subprocess.Popen([TOOL, *words, "--addr", coordinator.address], env=ENV,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    if words[0] == "generate":
        check(process.stdout.read(5) == b"Hello", "no text came")
    else:
        deadline = time.monotonic() + 30
        while not coordinator.requests and time.monotonic() < deadline:
            time.sleep(0.05)
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err, coordinator


def test_cancel():
    def script(connection, request):
        if request.WhichOneof("kind") == "generate":
            connection.event(request, text=pb.Text(text="Hello", tokens=[pb.TokenDetail(id=1)]))
        else:
            cancelled = pb.Request(id=request.cancel.id)
            connection.event(cancelled, text=pb.Text(text=" th"))
            connection.event(cancelled, done=pb.Done(finish=pb.FINISH_CANCELLED, output_tokens=1))
    words = ("generate", "--model", "m", "--prompt", "x")
    status, out, err, coordinator = interrupted(script, 1, *words)
    check(status == 130 and out == b" th\n", status, out, err)
    check(b"cancelled" in err, err)
    check([r.WhichOneof("kind") for r in coordinator.requests] == ["generate", "cancel"], "no CANCEL")

    def load(connection, request):
        if request.WhichOneof("kind") == "load":
            connection.event(request, progress=pb.Progress(phase="load", bytes_done=1, bytes_total=2))
        else:
            connection.event(pb.Request(id=request.cancel.id), done=pb.Done(finish=pb.FINISH_CANCELLED))
    status, out, err, coordinator = interrupted(load, 1, "load", "m", "--quiet")
    check(status == 130 and out == b"" and err.splitlines()[-1].endswith(b"cancelled"), status, out, err)
    check([r.WhichOneof("kind") for r in coordinator.requests] == ["load", "cancel"], "no CANCEL")

    def deaf(connection, request):
        if request.WhichOneof("kind") == "generate":
            connection.event(request, text=pb.Text(text="Hello"))
    began = time.monotonic()
    status, out, err, coordinator = interrupted(deaf, 2, *words)
    check(status == 130 and time.monotonic() - began < 5, status, err)


def test_chat_is_left():
    """At its prompt: Ctrl-C is answered with a hint, SIGTERM ends it, from a pipe either does."""
    coordinator = FakeCoordinator(pb, lambda c, r: None)
    words = [TOOL, "chat", "--model", "m", "--addr", coordinator.address]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(TOOL, words, ENV)
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        shown = b""
        for signal_number, word in ((None, b"> "), (signal.SIGINT, b"Ctrl-D leaves)\r\n> ")):
            if signal_number:
                os.kill(pid, signal_number)
            while word not in shown:
                shown += screen.read(4096)
        os.kill(pid, signal.SIGTERM)
        check(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, shown)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(words, env=ENV, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            pool.wait_until(lambda: pool.signal_is("SigCgt", process.pid, signal.SIGTERM), 30, "the chat watches")
            time.sleep(0.2)  # it reads
            process.send_signal(signal_number)
            check(process.wait(30) == 130, signal_number)


def test_tokenize():
    coordinator = FakeCoordinator(pb, lambda c, r: c.event(r, tokens=pb.Tokens(ids=[1, 0, 300])))
    words = ("tokenize", "--model", "m")
    result = run(coordinator, *words, "--json", "--special", "--no-bos", stdin="a\0ü\n".encode())
    check(json.loads(result.stdout) == {"ids": [1, 0, 300]}, result)
    got = coordinator.requests[0].tokenize
    check(got.text == "a\0ü\n" and got.special and got.no_bos, got)
    check(run(coordinator, *words, stdin=b"").stdout == b"1 0 300\n", "plain ids")
    one_line(run(coordinator, *words, stdin=b"ab\xc3"), 1, "standard input is not UTF-8 at byte 2")
    one_line(run(coordinator, *words, stdin=b"x" * ((1 << 20) + 1)), 1, "1048576")


def test_queries():
    def script(connection, request):
        kind = request.WhichOneof("kind")
        connection.event(request, **{
            "models": lambda: {"models": pb.Models(models=[
                pb.Model(name="tiny", bytes=1 << 20, architecture="llama", loaded=True),
                pb.Model(name="bad", bytes=3, problem="the file ends at byte 3")])},
            "plan": lambda: {"plan": pb.Plan(model="tiny", total_bytes=1 << 20, context=2048,
                                             kv_positions=4096, stages=STAGES, note="c left out")},
            "load": lambda: {"loaded": pb.Empty()},
            "unload": lambda: {"unloaded": pb.Empty()},
            "status": lambda: {"status": pb.Status(
                version="0.1.0", uptime_s=90,
                nodes=[pb.Node(name="a", state="ready", address="127.0.0.1:7", isa="avx2", threads=2,
                               memory_budget=1 << 30, memory_used=1 << 20, heartbeat_ms=0.25,
                               clock_known=True, clock_offset_us=-1.5e9, clock_error_us=62.5, slept_ms=34000),
                       pb.Node(name="b", state="ready", address="127.0.0.1:8", isa="avx2", threads=2)],
                loaded=[pb.LoadedModel(model="tiny", state="ready", context=2048, stages=[
                    pb.LoadedStage(node="a", last_layer=9, pieces_done=22, pieces_total=22,
                                   bytes_done=1 << 20, bytes_total=1 << 20)])])},
        }[kind]())
    coordinator = FakeCoordinator(pb, script)
    models = json.loads(run(coordinator, "models", "--json").stdout)["models"]
    check(models[0] == {"name": "tiny", "bytes": 1 << 20, "architecture": "llama", "loaded": True,
                        "problem": ""}, models)
    text = run(coordinator, "models").stdout.decode()
    check("1.0 MiB" in text and "loaded" in text and "ends at byte 3" in text, text)
    plan = json.loads(run(coordinator, "plan", "tiny", "--json").stdout)
    check(plan["stages"][1]["last_layer"] == 9 and plan["note"] == "c left out", plan)
    check("c left out" in run(coordinator, "plan", "--model", "tiny").stdout.decode(), "note")
    status = json.loads(run(coordinator, "status", "--json").stdout)
    check(status["nodes"][0]["name"] == "a" and status["nodes"][0]["heartbeat_ms"] == 0.25, status)
    check(status["nodes"][0]["clock_offset_us"] == -1.5e9 and status["nodes"][0]["clock_error_us"] == 62.5, status)
    check(status["nodes"][0]["slept_ms"] == 34000 and status["nodes"][1]["slept_ms"] == 0, status)
    check(status["nodes"][1]["clock_offset_us"] is None and status["nodes"][1]["clock_error_us"] is None, status)
    check(status["loaded"][0]["stages"][0]["pieces_done"] == 22, status)
    text = run(coordinator, "status").stdout.decode()
    check("22/22" in text and "90 s" in text and "0.25 ms" in text, text)
    check("+- 0.062 ms" in text and "a slept 34.0 s" in text and "b slept" not in text, text)
    check(run(coordinator, "load", "tiny").stdout == b"loaded\n", "load")
    check(run(coordinator, "unload", "tiny").stdout == b"unloaded\n", "unload")


def timeline():
    """A second in which a node reads two pieces and computes behind, with a name that is not plain."""
    def span(phase, lane, start, end, **more):
        return pb.TimelineSpan(phase=phase, node="box\x1b1", lane=lane, start_ms=start, end_ms=end,
                               **{"busy_ms": end - start, **more})
    return pb.Timeline(
        timeline_id=17, model="m", response_class=pb.CLASS_COLD, ttft_ms=1000, prompt_tokens=3, complete=True,
        segments=[pb.Segment(phase="open", node="coordinator", start_ms=0, ms=100),
                  pb.Segment(phase="read", node="box\x1b1", start_ms=100, ms=800.000001, bytes=1 << 20),
                  pb.Segment(phase="prefill", node="box\x1b1", cause="weights", start_ms=900.000001, ms=99.999999)],
        phases=[pb.Phase(phase="read", exposed_ms=800.000001, bytes=1 << 20),
                pb.Phase(phase="open", exposed_ms=100),
                pb.Phase(phase="prefill", exposed_ms=99.999999, hidden_ms=200)],
        nodes=[pb.TimelineNode(node="box\x1b1", clock_known=True, clock_offset_us=-5, clock_error_us=20,
                               residency_known=True, page_cache_after=1, shard_bytes=1 << 20,
                               medium_bytes=1 << 20, regime="buffered", process_ms=31)],
        spans=[pb.TimelineSpan(phase="open", node="coordinator", lane="worker", end_ms=100, busy_ms=100),
               span("read", "disk", -50, 500, busy_ms=500, bytes=1 << 19, piece="layer 0 attention"),
               span("repack", "disk", -50, 500, busy_ms=50),
               span("read", "disk", 500, 900, bytes=1 << 19, piece="layer 0 FFN"),
               span("prefill", "compute", 500, 700, cause="weights", cause_ms=499, run=1, rows=3),
               span("prefill", "compute", 900, 999, cause="weights", cause_ms=900, run=1, rows=3)])


def test_timeline():
    def script(connection, request):
        if request.timeline.timeline_id == 99:
            connection.event(request, error=pb.Error(code=12, text="no timeline 99; 3 to 17 are kept"))
        else:
            connection.event(request, timeline=timeline())
    coordinator = FakeCoordinator(pb, script)

    text = run(coordinator, "timeline").stdout.decode()
    check(coordinator.requests[0].timeline.timeline_id == 0, coordinator.requests[0])
    lines = text.splitlines()
    check(max(map(len, lines)) <= 100 and "\x1b" not in text, text)
    check(lines[0] == "m: cold, first token after 1000.0 ms, 3 prompt tokens, request 17", lines[0])
    check(all(line == line.rstrip() for line in lines), text)
    bars = {" ".join(line[:23].split()): line[23:79] for line in lines[3:8]}
    check(bars["exposed"] == "o" * 6 + "r" * 44 + "P" * 6, bars)
    check(bars["coordinator worker"].rstrip() == "o" * 6, bars)
    check(bars["box?1 disk"].rstrip() == "r" * 51, bars)
    check(bars["compute"] == " " * 28 + "P" * 12 + " " * 10 + "P" * 6, bars)

    check(run(coordinator, "timeline", "17").returncode == 0, "ID")
    check(coordinator.requests[1].timeline.timeline_id == 17, coordinator.requests[1])
    got = json.loads(run(coordinator, "timeline", "--json").stdout)
    check(got["id"] == 17 and got["class"] == "cold" and got["predicted_ms"] is None, got)
    check(abs(sum(part["ms"] for part in got["exposed"]) - got["ttft_ms"]) < 1e-9, got["exposed"])
    check(set(got["exposed"][0]) >= {"phase", "node", "start_ms", "ms", "bytes"}, got["exposed"])
    check(set(got["phases"][0]) >= {"phase", "exposed_ms", "hidden_ms", "bytes"}, got["phases"])
    check(set(got["nodes"][0]) >= {"node", "clock_offset_us", "clock_error_us", "page_cache_before",
                                   "page_cache_after", "medium_bytes"}, got["nodes"])
    check(len(got["spans"]) == 6 and got["spans"][1]["start_ms"] == -50, got["spans"])

    one_line(run(coordinator, "timeline", "99"), 1, "99", "3 to 17")
    one_line(run(coordinator, "timeline", "0"), 2, "'0'", "request's number")
    one_line(run(coordinator, "timeline", "7x"), 2, "7x")
    one_line(run(coordinator, "timeline", "--json", "--perfetto", "-"), 2, "--perfetto")
    one_line(run(coordinator, "timeline", "--perfetto", "/no/such/folder/x"), 1, "/no/such/folder/x")


def check_trace(trace):
    """The rules of the trace event format that a viewer relies on."""
    named, rows = set(), {}
    for event in trace["traceEvents"]:
        check(isinstance(event["pid"], int) and isinstance(event["tid"], int), event)
        if event["ph"] == "M":
            check(event["name"] in ("process_name", "thread_name"), event)
            check(isinstance(event["args"]["name"], str), event)
            named.add((event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0))
            continue
        check(event["ph"] == "X" and isinstance(event["name"], str), event)
        check(event["ts"] >= 0 and event["dur"] >= 0, event)
        check(("process_name", event["pid"], 0) in named, "process without a name", event)
        check(("thread_name", event["pid"], event["tid"]) in named, "thread without a name", event)
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        check(all(a[1] <= b[0] + 0.01 for a, b in zip(row, row[1:])), "events of a thread overlap", row)
    return rows


def test_perfetto():
    coordinator = FakeCoordinator(pb, lambda connection, request: connection.event(request, timeline=timeline()))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        result = run(coordinator, "timeline", "--perfetto", path)
        check(result.returncode == 0 and result.stdout == b"" and path.encode() in result.stderr, result)
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        full = os.path.join(folder, "full")
        os.symlink("/dev/full", full)
        one_line(run(coordinator, "timeline", "--perfetto", full), 1, "No space left")
        check(os.path.lexists(full), "what is no file of ours stays")
    rows = check_trace(trace)
    check(len(rows[0, 1]) == 3, "the chain is there", rows)
    check(sum(len(row) for row in rows.values()) == 9, rows)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    check({"exposed chain", "coordinator", "disk", "disk 2", "compute", "worker"} <= names, names)
    check(run(coordinator, "timeline", "--perfetto", "-").stdout.startswith(b"{"), "standard output")


def test_full_disk():
    """A trace that cannot be written costs one sentence: no half of it, and what was there stays."""
    coordinator = FakeCoordinator(pb, lambda connection, request: connection.event(request, timeline=timeline()))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        with open(path, "w", encoding="ascii") as file:
            file.write("of yesterday")

        def little_space():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        one_line(run(coordinator, "timeline", "--perfetto", path, preexec_fn=little_space), 1, path, "too large")
        check(os.listdir(folder) == ["trace.json"], os.listdir(folder))
        with open(path, encoding="ascii") as file:
            check(file.read() == "of yesterday", "the file of yesterday is gone")
        if os.geteuid() == 0:
            full = os.path.join(folder, "full")
            os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
            one_line(run(coordinator, "timeline", "--perfetto", full), 1, full, "No space left")
            check(stat.S_ISCHR(os.stat(full).st_mode), "the device is gone")


def test_chat():
    def script(connection, request):
        said = request.generate.messages[-1].content
        if said == "fail":
            connection.event(request, error=pb.Error(code=27, text="busy"))
            return
        connection.event(request, text=pb.Text(text="You said " + said))
        connection.event(request, done=pb.Done(finish=pb.FINISH_STOP))
    coordinator = FakeCoordinator(pb, script)
    chat = ("chat", "--model", "m", "--system", "Be brief.", "--quiet")
    result = run(coordinator, *chat, stdin=b"one\n\ntwo\n/reset\nthree\n/system New.\nfour\n/exit\nnever\n")
    check(result.returncode == 0, result)
    check(result.stdout == b"You said one\nYou said two\nYou said three\nYou said four\n", result.stdout)
    said = [[(m.role[0], m.content) for m in r.generate.messages] for r in coordinator.requests]
    check(said == [[("s", "Be brief."), ("u", "one")],
                   [("s", "Be brief."), ("u", "one"), ("a", "You said one"), ("u", "two")],
                   [("s", "Be brief."), ("u", "three")],
                   [("s", "New."), ("u", "four")]], said)
    result = run(coordinator, *chat, stdin=b"fail\nok\n/rset\n")
    check(result.returncode == 1 and result.stdout == b"You said ok\n", result)
    check(b"busy" in result.stderr and b"/reset" in result.stderr, result.stderr)
    check(len(coordinator.requests[-1].generate.messages) == 2, "a failed turn left a trace")


def test_keygen():
    with tempfile.TemporaryDirectory() as folder:
        env = {"HOME": folder, "XDG_CONFIG_HOME": ""}
        path = folder + "/.config/firstlight/pool.key"
        result = run(None, "keygen", env=env)
        check(result.returncode == 0 and result.stdout.decode() == path + "\n", result)
        check(stat.S_IMODE(os.stat(path).st_mode) == 0o600, oct(os.stat(path).st_mode))
        before = open(path).read()
        check(before.startswith("firstlight-key-1 ") and len(before.split()[1]) == 64, before)
        one_line(run(None, "keygen", env=env), 1, path)
        check(open(path).read() == before, "the key was replaced")
        check(run(None, "keygen", "--out", folder + "/k").returncode == 0, "--out")
        check(open(folder + "/k").read() != before, "the same key twice")
        os.chmod(path, 0o644)
        one_line(run(None, "status", "--key-file", path), 1, "600")


threading.excepthook = lambda args: None  # a client that goes away is part of the cases
pool.main([test_generate_json, test_generate_text, test_generate_request, test_errors, test_usage,
           test_bad_servers, test_cancel, test_chat_is_left, test_tokenize, test_queries,
           test_timeline, test_perfetto, test_full_disk, test_chat, test_keygen])
