"""A coordinator that says what a test tells it to, for tests of the client tool.

It speaks proto/client.proto through Python's protobuf package, so that what the
C code packs and unpacks is seen by another implementation.
"""
import importlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def client_protocol():
    """The Python module that protoc makes of proto/client.proto; exits 77 without protobuf."""
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        skip("the Python package protobuf is not installed (python3-protobuf)")
    folder = tempfile.mkdtemp(prefix="fl_client_proto_")
    try:
        subprocess.run(["protoc", "--proto_path=" + os.path.join(ROOT, "proto"), "--python_out=" + folder,
                        "client.proto"], check=True)
    except FileNotFoundError:
        skip("protoc is not installed (protobuf-compiler)")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("client_pb2")
    finally:
        shutil.rmtree(folder)


def skip(reason):
    print("skipped: " + reason)
    sys.exit(77)


class Connection:
    """Frames on a socket: 4 bytes little-endian length, then the message."""

    def __init__(self, sock, pb):
        self.sock, self.pb = sock, pb

    def read(self, size):
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def request(self):
        size, = struct.unpack("<I", self.read(4))
        return self.pb.Request.FromString(self.read(size))

    def event(self, request, **kind):
        data = self.pb.Event(id=request.id, **kind).SerializeToString()
        self.sock.sendall(struct.pack("<I", len(data)) + data)

    def raw(self, data):
        self.sock.sendall(data)


class FakeCoordinator:
    """Accepts connections on loopback; `script(connection, request)` answers each request."""

    def __init__(self, pb, script):
        self.pb, self.script = pb, script
        self.requests = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.talk, args=(sock,), daemon=True).start()

    def talk(self, sock):
        connection = Connection(sock, self.pb)
        try:
            while True:
                request = connection.request()
                self.requests.append(request)
                if self.script(connection, request) == "close":
                    break
        except (EOFError, OSError):
            pass
        sock.close()

    def close(self):
        self.listener.close()
