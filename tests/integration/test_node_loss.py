#!/usr/bin/env python3
"""Nodes that die, come back, come twice or come late; coordinators that restart."""
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import pool as cluster

MODEL = cluster.SMOLLM2


def answer_of(pool, *arguments):
    return pool.generate(MODEL, "--prompt", "The capital of France is", "--max-tokens", "8", *arguments)


def expect_recovery(pool, running, lost):
    out, err = running.communicate(timeout=30)
    assert running.returncode == 1, f"exit {running.returncode}: {err.decode()}"
    assert lost in err.decode(), f"the error does not name {lost}: {err.decode()}"
    answer = answer_of(pool).json()
    assert len(answer["tokens"]) == 8
    assert lost not in [stage["node"] for stage in answer["stages"]], answer["stages"]
    assert pool.coordinator.alive()
    return out


def killed_in_decode():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=3) as pool:
        answer_of(pool).json()
        running = pool.client("generate", "--model", MODEL, "--prompt", "Count:", "--max-tokens", "2000", "--ignore-end")
        first = running.stdout.read(1)
        assert first, "no text came"
        pool.nodes["box2"].kill()
        expect_recovery(pool, running, "box2")


def killed_in_prefill():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=3, coordinator=["--chunk", "4"]) as pool:
        answer_of(pool).json()
        long = cluster.longest_prompt("smollm2")
        running = pool.client("generate", "--model", MODEL, "--tokens", cluster.tokens_text(long), "--max-tokens", "8")
        time.sleep(1)
        assert running.poll() is None, "the prefill was over too soon to be interrupted"
        pool.nodes["box3"].kill()
        expect_recovery(pool, running, "box3")


def killed_in_load():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=3, fetch=True) as pool:
        running = pool.client("generate", "--model", MODEL, "--prompt", "Hi", "--max-tokens", "500", "--ignore-end")
        cluster.wait_until(lambda: pool.status().get("loaded"), 20, "a load begins")
        pool.nodes["box1"].kill()
        expect_recovery(pool, running, "box1")


def comes_back_after_a_restart():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        before = answer_of(pool, "--top-logits", "5").json()
        pool.nodes["box1"].kill()
        cluster.wait_until(lambda: pool.ready() == ["box2"], 20, "box1 is missed")
        pool.start_node("box1")
        pool.wait_for(2)
        pool.run("unload", "--model", MODEL)
        after = answer_of(pool, "--top-logits", "5").json()
        assert len(after["stages"]) == 2
        assert before["tokens"] == after["tokens"] and before["top_logits"] == after["top_logits"]


def restarted_at_once_is_not_taken_for_its_former_self():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        want = answer_of(pool).json()["tokens"]
        for _ in range(3):
            pool.nodes["box2"].kill()
            pool.start_node("box2")
            pool.wait_for(2)
            answer = answer_of(pool)
            # The old self may be missed in the middle of this request; then the next one must work.
            if answer.status != 0:
                assert "box2" in answer.error()
                answer = answer_of(pool)
            assert answer.json()["tokens"] == want


def nodes_come_before_the_coordinator():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=0, wait=False) as pool:
        cluster.wait_until(lambda: "welcome" in pool.coordinator.log(), 20, "the coordinator is up")
        assert pool.coordinator.stop() == 0
        pool.start_node("early")
        time.sleep(1)
        assert pool.nodes["early"].alive()
        pool.start_coordinator()
        pool.wait_for(1)
        answer_of(pool).json()


def coordinator_restarts_on_the_same_ports():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        want = answer_of(pool).json()["tokens"]
        for how in ("kill", "stop"):
            getattr(pool.coordinator, how)()
            pool.start_coordinator()
            pool.wait_for(2)
            assert answer_of(pool).json()["tokens"] == want


def the_same_name_twice_is_refused():
    with cluster.Pool(nodes=1) as pool:
        twin = pool.start("twin", [*pool.node_line("box1"), "--join", pool.join])
        cluster.wait_until(lambda: not twin.alive(), 20, "the second box1 gives up")
        assert twin.popen.returncode == 1
        assert "box1" in twin.log(), twin.log()
        assert pool.ready() == ["box1"]
        assert pool.nodes["box1"].alive()


def stopped_while_it_starts():
    """A signal that comes before the doors are open ends a program like any other."""
    with cluster.Pool(nodes=0) as pool:
        lines = ([cluster.program("firstlight-coordinator"), "--listen", "127.0.0.1:0", "--client-listen", "127.0.0.1:0",
                  "--models", pool.folder], [*pool.node_line("brief"), "--join", pool.join])
        for line in lines:
            for number in range(4):
                brief = pool.start(f"brief{number}", line)
                cluster.wait_until(lambda: cluster.signal_is("SigBlk", brief.pid, signal.SIGTERM), 10, "main() begins")
                time.sleep(number * 0.01)
                assert brief.stop() == 0, (line[0], number, brief.popen.returncode, brief.log())


def stopped_on_purpose_is_no_loss():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=2) as pool:
        answer_of(pool).json()
        assert pool.nodes["box1"].stop() == 0
        cluster.wait_until(lambda: pool.status().get("nodes", [{}])[0].get("name") == "box2", 5, "box1 is listed no more")
        assert "node box1 left" in pool.coordinator.log() and "lost" not in pool.coordinator.log()
        assert [stage["node"] for stage in answer_of(pool).json()["stages"]] == ["box2"]
        running = pool.client("generate", "--model", MODEL, "--prompt", "Count:", "--max-tokens", "2000", "--ignore-end")
        assert running.stdout.read(1), "no text came"
        pool.nodes["box2"].stop()
        _, err = running.communicate(timeout=30)
        assert running.returncode == 1 and "node box2 was stopped" in err.decode(), err


def two_coordinators_on_one_port():
    with cluster.Pool(nodes=1) as pool:
        for arguments in (["--listen", pool.join, "--client-listen", "127.0.0.1:0"],
                          ["--listen", "127.0.0.1:0", "--client-listen", pool.address]):
            second = subprocess.run([cluster.program("firstlight-coordinator"), *arguments, "--models", cluster.MODELS],
                                    capture_output=True, timeout=20, text=True, check=False)
            assert second.returncode == 1, second
            assert "in use" in second.stderr and second.stderr.count("\n") == 1, second.stderr
        assert pool.ready() == ["box1"]


def no_node_at_all():
    cluster.need_model(MODEL)
    with cluster.Pool(nodes=0) as pool:
        assert "node" in answer_of(pool).error()
        pool.start_node("late")
        pool.wait_for(1)
        answer_of(pool).json()


if __name__ == "__main__":
    cluster.main([killed_in_decode, killed_in_prefill, killed_in_load, comes_back_after_a_restart,
                  restarted_at_once_is_not_taken_for_its_former_self, nodes_come_before_the_coordinator,
                  coordinator_restarts_on_the_same_ports, the_same_name_twice_is_refused, stopped_while_it_starts,
                  stopped_on_purpose_is_no_loss, two_coordinators_on_one_port,
                  no_node_at_all])
