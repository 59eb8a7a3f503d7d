#!/usr/bin/env python3
"""docs/performance.md says what docs/performance/cold.json says, and the generator notices when it does not."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool

RENDER = os.path.join(pool.ROOT, "tests", "bench", "render")
PAGE = os.path.join(pool.ROOT, "docs", "performance.md")
RESULT = os.path.join(pool.ROOT, "docs", "performance", "cold.json")


def render(*arguments):
    return subprocess.run([RENDER, *arguments], capture_output=True, text=True, timeout=60, check=False)


class Copy:
    """The page and its source, to be spoilt."""

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="firstlight-page.")
        self.page, self.result = (shutil.copy(path, self.folder) for path in (PAGE, RESULT))
        return self

    def __exit__(self, kind, value, trace):
        shutil.rmtree(self.folder)

    def render(self, *more):
        return render("--page", self.page, "--json", self.result, *more)

    def change_result(self, change):
        with open(self.result, encoding="utf-8") as file:
            result = json.load(file)
        change(result)
        with open(self.result, "w", encoding="utf-8") as file:
            json.dump(result, file)

    def text(self):
        with open(self.page, encoding="utf-8") as file:
            return file.read()

    def write(self, text):
        with open(self.page, "w", encoding="utf-8") as file:
            file.write(text)


def refused(done, *words):
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stderr.count("\n") == 1 and all(word in done.stderr for word in words), done.stderr


def the_page_is_its_source():
    done = render("--check")
    assert done.returncode == 0, done.stderr


def every_cell_of_the_source_is_on_the_page():
    with open(RESULT, encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    with open(PAGE, encoding="utf-8") as file:
        lines = file.read().splitlines()
    assert cells
    for row in cells:
        found = [line for line in lines if line.startswith(f"| {row['cell']} | {row['title']} |")]
        assert len(found) == 1 and f"**{row['ratio']:.2f}**" in found[0], (row["cell"], found)
        assert row["class"] in found[0]


def a_changed_source_is_noticed_and_rendered():
    def faster(result):
        result["cells"][0]["ttft_ms"]["median"] = 12.0
    with Copy() as copy:
        copy.change_result(faster)
        done = copy.render("--check")
        assert done.returncode == 1 and "tests/bench/render" in done.stderr, done.stderr
        assert copy.render().returncode == 0
        assert "| 12.0 |" in copy.text()
        assert copy.render("--check").returncode == 0


def a_hand_in_the_generated_part_is_noticed_and_the_rest_kept():
    with Copy() as copy:
        text = copy.text()
        copy.write("By hand.\n" + text.replace("Machine: ", "Machine, a fast one: ", 1) + "\nAlso by hand.\n")
        assert copy.render("--check").returncode == 1
        assert copy.render().returncode == 0
        assert copy.text() == "By hand.\n" + text + "\nAlso by hand.\n"


def what_cannot_be_rendered_costs_one_sentence():
    with Copy() as copy:
        text = copy.text()
        copy.write(text.replace("<!-- cold: end -->", ""))
        refused(copy.render(), "cold: end", copy.page)
        copy.write(text)
        copy.change_result(lambda result: result["cells"][0].pop("ratio"))
        refused(copy.render(), copy.result, "ratio")
        with open(copy.result, "w", encoding="utf-8") as file:
            file.write("{")
        refused(copy.render(), copy.result)
        refused(render("--json", "/nowhere.json"),
                "/nowhere.json")
        refused(render("--page", "/nowhere.md"), "/nowhere.md")
        refused(render("--often"), "--often")
        assert copy.text() == text


if __name__ == "__main__":
    pool.main([the_page_is_its_source, every_cell_of_the_source_is_on_the_page, a_changed_source_is_noticed_and_rendered,
               a_hand_in_the_generated_part_is_noticed_and_the_rest_kept, what_cannot_be_rendered_costs_one_sentence])
