"""The sizes of a GGUF model, read from its header alone and independently of pipeline/gguf.c.

Bytes are as they lie in the file; what a stage needs is counted by layer:

    embed_row    one row of token_embd, what the first stage needs for each token of a prompt
    layers[i]    every tensor of blk.i.
    head         output_norm and the output matrix, or token_embd when the head is tied
"""
import os
import struct

# GGUF's number of an element type: (elements of a block, bytes of a block).
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144),
          13: (256, 176), 14: (256, 210), 30: (1, 2)}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
COUNT_MAX = 1 << 26
STRING_MAX = 1 << 26


class Refused(Exception):
    """The file is none this reader understands; says why."""


class Reader:
    def __init__(self, file, path):
        self.file, self.path = file, path

    def take(self, size):
        data = self.file.read(size)
        if len(data) != size:
            raise Refused(f"{self.path}: the header ends early")
        return data

    def number(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, most):
        value = self.number("Q")
        if value > most:
            raise Refused(f"{self.path}: a length of {value} where at most {most} would be right")
        return value

    def text(self):
        return self.take(self.count(STRING_MAX)).decode("utf-8", "replace")

    def scalar(self, kind):
        if kind == STRING:
            return self.text()
        if kind not in SCALARS:
            raise Refused(f"{self.path}: a value of type {kind} is unknown")
        return self.number(SCALARS[kind])

    def value(self):
        """A value; of arrays only the length matters here, their elements are passed over."""
        kind = self.number("I")
        if kind != ARRAY:
            return self.scalar(kind)
        element, count = self.number("I"), self.count(COUNT_MAX)
        if element == STRING:
            for _ in range(count):
                self.take(self.count(STRING_MAX))
        else:
            if element not in SCALARS:
                raise Refused(f"{self.path}: an array of type {element} is unknown")
            self.take(count * struct.calcsize("<" + SCALARS[element]))
        return [None] * min(count, 1)

    def tensor(self):
        name, dimensions = self.text(), self.number("I")
        if not 1 <= dimensions <= 4:
            raise Refused(f"{self.path}: tensor {name} has {dimensions} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        kind, _ = self.number("I"), self.number("Q")
        if kind not in BLOCKS:
            raise Refused(f"{self.path}: tensor {name} has the unknown type {kind}")
        elements, size = BLOCKS[kind]
        rows = 1
        for extent in shape[1:]:
            rows *= extent
        return name, shape[0] // elements * size, rows


class Model:
    """What a cold start must move, in bytes."""

    def __init__(self, path):
        self.path, self.file_size = path, os.path.getsize(path)
        with open(path, "rb") as file:
            reader = Reader(file, path)
            if reader.take(4) != b"GGUF" or reader.number("I") not in (2, 3):
                raise Refused(f"{path}: no GGUF file of version 2 or 3")
            tensors, keys = reader.count(COUNT_MAX), reader.count(COUNT_MAX)
            self.keys = {}
            for _ in range(keys):
                name = reader.text()
                self.keys[name] = reader.value()
            self.tensors = {}
            for _ in range(tensors):
                name, row, rows = reader.tensor()
                self.tensors[name] = (row, rows)
        self.sum_up()

    def sum_up(self):
        architecture = self.keys.get("general.architecture")
        try:
            self.architecture = architecture
            self.layer_count = self.keys[f"{architecture}.block_count"]
            self.width = self.keys[f"{architecture}.embedding_length"]
            self.embed_row, self.vocabulary = self.tensors["token_embd.weight"]
        except KeyError as missing:
            raise Refused(f"{self.path}: lacks {missing}") from None
        if not 1 <= self.layer_count <= 4096:
            raise Refused(f"{self.path}: has {self.layer_count} layers; 1 to 4096 would be right")
        self.layers = [0] * self.layer_count
        for name, (row, rows) in self.tensors.items():
            if name.startswith("blk."):
                layer = int(name.split(".")[1])
                if layer >= self.layer_count:
                    raise Refused(f"{self.path}: tensor {name} belongs to no layer")
                self.layers[layer] += row * rows
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        norm = self.tensors.get("output_norm.weight", (0, 0))
        self.head = head[0] * head[1] + norm[0] * norm[1]
