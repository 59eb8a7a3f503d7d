#!/usr/bin/python3
"""The client protocol from outside: Python's protobuf package and a socket, against a real cluster."""
import contextlib
import io
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import pool  # noqa: E402
from fake_coordinator import Connection, client_protocol  # noqa: E402

pb = client_protocol()


class Client(Connection):
    """All that a client in another language needs: see docs/protocol.md."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        super().__init__(socket.create_connection((host, int(port)), timeout=60), pb)
        self.last = 0

    def send(self, **kind):
        self.last += 1
        data = pb.Request(version=1, id=self.last, **kind).SerializeToString()
        self.sock.sendall(struct.pack("<I", len(data)) + data)
        return self.last

    def next(self):
        size, = struct.unpack("<I", self.read(4))
        return pb.Event.FromString(self.read(size))

    def ask(self, **kind):
        """Events of one request, the last one included."""
        request = self.send(**kind)
        events = []
        while True:
            event = self.next()
            assert event.id == request, event
            events.append(event)
            if event.WhichOneof("kind") not in ("admitted", "progress", "text"):
                return events


def made_model(folder, name="tiny"):
    subprocess.run([pool.program("mkmodel"), "--layers", "3", "--width", "64", "--heads", "2", "--kv-heads", "1",
                    "--ffn", "96", "--vocab", "600", "--context", "256", "--type", "Q8_0", "--out",
                    os.path.join(folder, name + ".gguf")], check=True)


def kinds(events):
    return [event.WhichOneof("kind") for event in events]


def test_python_speaks_to_a_cluster():
    with tempfile.TemporaryDirectory() as folder:
        made_model(folder)
        with pool.Pool(nodes=1, models=folder) as cluster:
            client = Client(cluster.address)
            conversation(client)
            mistakes(cluster, client)


def conversation(client):
    models = client.ask(models=pb.Empty())[-1].models.models
    assert [model.name for model in models] == ["tiny"], models
    plan = client.ask(plan=pb.ByModel(model="tiny"))[-1].plan
    assert plan.stages[0].first_layer == 0 and plan.stages[-1].last_layer == 2, plan
    ids = client.ask(tokenize=pb.Tokenize(model="tiny", text="hello", no_bos=True))[-1].tokens.ids
    assert len(ids) > 0

    events = client.ask(generate=pb.Generate(model="tiny", prompt="hello", no_bos=True, max_tokens=8, ignore_end=True,
                                             sampling=pb.Sampling(top_logits=3)))
    done = events[-1].done
    assert kinds(events)[-1] == "done", events[-1]
    tokens = [token.id for event in events for token in event.text.tokens]
    assert len(tokens) == done.output_tokens == 8, (tokens, done)
    assert done.prompt_tokens == len(ids) and done.finish == pb.FINISH_LENGTH, done
    assert done.response_class in (pb.CLASS_COLD, pb.CLASS_PARTIAL), done
    assert len(done.logits) == 3 and done.logits[0].value >= done.logits[1].value, done
    assert done.logits[0].id == tokens[0], "greedy decoding takes the largest logit"

    again = client.ask(generate=pb.Generate(model="tiny", tokens=ids, max_tokens=8, ignore_end=True))
    assert [token.id for event in again for token in event.text.tokens] == tokens, "the same prompt, as tokens"
    assert again[-1].done.response_class == pb.CLASS_WARM, again[-1]

    status = client.ask(status=pb.Empty())[-1].status
    assert [node.state for node in status.nodes] == ["ready"], status
    assert [model.model for model in status.loaded] == ["tiny"], status
    assert kinds(client.ask(unload=pb.ByModel(model="tiny"))) == ["unloaded"]
    assert kinds(client.ask(load=pb.ByModel(model="tiny")))[-1] == "loaded"

    long = client.send(generate=pb.Generate(model="tiny", prompt="hello", max_tokens=200, ignore_end=True))
    while client.next().WhichOneof("kind") != "text":
        pass
    client.send(cancel=pb.Cancel(id=long))
    while True:
        event = client.next()
        if event.WhichOneof("kind") in ("done", "error"):
            break
    assert event.id == long and event.done.finish in (pb.FINISH_CANCELLED, pb.FINISH_LENGTH), event


def mistakes(cluster, client):
    for wrong in ({"generate": pb.Generate(model="tiny")}, {"load": pb.ByModel(model="nobody")},
                  {"generate": pb.Generate(model="../tiny", prompt="x")},
                  {"generate": pb.Generate(model="tiny", prompt="x", sampling=pb.Sampling(top_p=2))}, {}):
        event = client.ask(**wrong)[-1]
        assert event.WhichOneof("kind") == "error" and event.error.text and "\n" not in event.error.text, event
    # A limit is named, and the connection goes on.
    long = [pb.ChatMessage(role="user", content="x")] * 3000
    event = client.ask(generate=pb.Generate(model="tiny", messages=long))[-1]
    assert "3000 messages, the limit is 1024" in event.error.text, event
    # Garbage costs the connection that sent it, and no other.
    for garbage in (b"\xff\xff\xff\xff", b"\x05\0\0\0\xff\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
        other = Client(cluster.address)
        other.raw(garbage)
        try:
            while other.sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert kinds(client.ask(models=pb.Empty())) == ["models"]


def manual_code(holding):
    """The Python of docs/protocol.md that holds a word."""
    with open(os.path.join(pool.ROOT, "docs", "protocol.md"), encoding="utf-8") as file:
        blocks = re.findall(r"^```python\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)
    block, = [block for block in blocks if holding in block]
    return block


def test_the_handshake_of_the_manual_opens_a_door_with_a_key():
    with tempfile.TemporaryDirectory() as folder:
        made_model(folder)
        key = os.path.join(folder, "pool.key")
        subprocess.run([pool.program("firstlight"), "keygen", "--out", key], check=True, stdout=subprocess.DEVNULL)
        with pool.Pool(nodes=0, models=folder, key=key) as cluster:
            pool.wait_until(cluster.status, 30, "the coordinator answers")
            client = Client(cluster.address)
            names = {"sock": client.sock, "read": client.read, "struct": struct, "path": key}
            exec(manual_code("compare_digest"), names)  # noqa: S102: this is what the test is about
            assert names["welcome"][6] == 4, names["welcome"]
            assert kinds(client.ask(models=pb.Empty())) == ["models"]

            with open(key, "w", encoding="utf-8") as file:
                file.write("firstlight-key-1 " + "0" * 64 + "\n")
            names["sock"] = (other := Client(cluster.address)).sock
            names["read"] = other.read
            try:
                exec(manual_code("compare_digest"), names)  # noqa: S102
                raise RuntimeError("another key was let in")
            except (AssertionError, SystemExit):
                pass
            strange = Client(cluster.address)
            strange.send(models=pb.Empty())
            event = strange.next()
            assert event.id == 0 and event.error.code == 42 and "--key-file" in event.error.text, event


def test_the_example_of_the_manual_gets_an_answer():
    pool.need_model(pool.SMOLLM2)
    with pool.Pool(nodes=1) as cluster:
        host, port = cluster.address.rsplit(":", 1)
        code = manual_code("Why is the sky blue?").replace('("127.0.0.1", 7411)', f'("{host}", {port})')
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {"__name__": "manual"})  # noqa: S102
        assert re.search(r"\S+\n[0-9]+ tokens, [0-9.]+/s\n$", out.getvalue()), out.getvalue()


pool.main([test_python_speaks_to_a_cluster, test_the_handshake_of_the_manual_opens_a_door_with_a_key,
           test_the_example_of_the_manual_gets_an_answer])
