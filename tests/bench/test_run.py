import json

import pytest

from rmsnorm.bench import report
from rmsnorm.bench.grid import Cell
from rmsnorm.bench.limit import Candidate
from rmsnorm.bench.peers import Compiler
from rmsnorm.bench.run import Bench, Policy, Timing, WrongResultError, judge, measure, run, settle

CELL = Cell("forward", 8, 4096, "bfloat16")
CALL = Cell("call", 1, 4096, "bfloat16")
COPY_CELL = Cell("forward", 4096, 4096, "bfloat16", "hot", "given")


def timings(**medians):
    """Steady timings; the names' underscores stand for blanks."""
    return {name.replace("_", " "): Timing((value,) * 6, 1) for name, value in medians.items()}


WINS = timings(
    copy=1.0,
    memcpy=0.9,
    ours_torch=2.0,
    eager_torch=9.0,
    compiled_torch=4.0,
    ours_llama=3.0,
    eager_llama=9.0,
    compiled_llama=4.0,
)
LOSES = {**WINS, **timings(compiled_llama=2.5)}


class FakeMachine:
    """A clock that only the candidates move."""

    def __init__(self):
        self.now = 0
        self.log = []

    def clock(self):
        return self.now

    def candidate(self, name, *durations):
        """Takes ``durations`` nanoseconds in turn, call after call."""
        calls = 0

        def call():
            nonlocal calls
            self.now += durations[calls % len(durations)]
            calls += 1
            self.log.append(name)

        return Candidate(name, call, lambda x, out: ())

    def batch(self, bind, calls):
        return [() for _ in range(calls)]


def test_statistics():
    timing = Timing((3.0, 1.0, 2.0, 100.0), 1)
    assert timing.median == 2.5
    assert timing.mad == 1.0
    assert Timing((5.0,), 1).drift == 1.0


@pytest.mark.parametrize(
    ("samples", "disturbed"),
    [
        ((10.0,) * 10, False),
        ((10.0, 10.2, 9.9, 10.1, 10.0, 9.8), False),
        ((10.0, 10.0, 10.0, 90.0, 10.0, 10.0, 10.0), False),
        ((10.0,) * 5 + (14.0,) * 5, True),
        ((14.0,) * 5 + (10.0,) * 5, True),
        ((10.0, 15.0, 8.0, 12.0, 10.0, 15.0, 8.0, 12.0), True),
    ],
)
def test_a_disturbed_run_is_seen(samples, disturbed):
    assert Timing(samples, 1).disturbed is disturbed


def test_medians_are_microseconds_of_one_call():
    machine = FakeMachine()
    fast = machine.candidate("fast", 1_000)
    slow = machine.candidate("slow", 3_000_000)
    found = measure([fast, slow], machine, Policy(), clock=machine.clock)
    assert found["fast"].median == 1.0
    assert found["slow"].median == 3000.0
    assert found["slow"].calls == 1
    # A sample of the fast one fills 200 microseconds.
    assert found["fast"].calls >= 200
    assert 5 <= len(found["fast"].samples) == len(found["slow"].samples) <= 51


def test_the_number_of_rounds_follows_the_budget():
    policy = Policy(budget_ns=60_000_000, min_rounds=3, max_rounds=50)
    for duration, rounds in ((10_000_000, 6), (100_000_000, 3), (500_000, 50)):
        machine = FakeMachine()
        one = machine.candidate("one", duration)
        found = measure([one], machine, policy, clock=machine.clock)
        assert len(found["one"].samples) == rounds


def test_rounds_are_interleaved_and_their_order_rotates():
    machine = FakeMachine()
    names = ["a", "b", "c"]
    candidates = [machine.candidate(name, 10_000_000) for name in names]
    policy = Policy(budget_ns=120_000_000, min_rounds=3)
    measure(candidates, machine, policy, clock=machine.clock)
    assert "".join(machine.log[-12:]) == "abcbcacababc"


def test_who_would_use_up_the_time_alone_is_sampled_three_times():
    machine = FakeMachine()
    fast = machine.candidate("fast", 10_000_000)
    slow = machine.candidate("slow", 50_000_000)
    policy = Policy(budget_ns=100_000_000, min_rounds=2)
    found = measure([fast, slow], machine, policy, clock=machine.clock)
    assert len(found["fast"].samples) == 10
    assert len(found["slow"].samples) == 3
    assert found["slow"].median == 50_000.0
    assert [index for index, name in enumerate(machine.log[-13:]) if name == "slow"] == [1, 6, 11]


def test_a_warm_call_is_not_timed():
    machine = FakeMachine()
    # Every second call is slow: with a warm call before each sample, only the first of each pair.
    one = machine.candidate("one", 50_000_000, 10_000_000)
    found = measure([one], machine, Policy(), warm=True, clock=machine.clock)
    assert set(found["one"].samples) == {10_000.0}


def test_a_call_that_takes_no_time_ends():
    machine = FakeMachine()
    found = measure([machine.candidate("one", 0)], machine, Policy(), clock=machine.clock)
    assert found["one"].calls == 20_000


def test_judging():
    assert all(comparison.ok for comparison in judge(CELL, WINS))
    lost = [comparison for comparison in judge(CELL, LOSES) if not comparison.ok]
    assert [(one.limit.ours, one.limit.rival, one.ratio) for one in lost] == [
        ("ours llama", "compiled llama", 1.2)
    ]


def test_absent_peers_are_left_out_but_absent_ours_loses():
    eager_only = {name: value for name, value in WINS.items() if "compiled" not in name}
    assert len(judge(CELL, eager_only)) == 2
    (comparison,) = judge(CALL, timings(add=2.0))
    assert comparison.ratio is None
    assert not comparison.ok
    assert "could not be measured" in report.describe(comparison)


@pytest.mark.parametrize(("median", "ok"), [(3.8, True), (3.9, False)])
def test_the_call_limit(median, ok):
    assert judge(CALL, timings(add=2.0, op_torch=median))[0].ok is ok


@pytest.mark.parametrize(("median", "ok"), [(1.3, True), (1.31, False)])
def test_the_copy_limit_is_against_the_plain_tensor_copy(median, ok):
    measured = {**WINS, **timings(ours_torch=median, ours_llama=1.0, memcpy=0.1)}
    assert all(one.ok for one in judge(COPY_CELL, measured)) is ok


class Script:
    """Gives prepared timings, one after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, cell):
        return self.answers.pop(0)


def disturb(measured, control="copy"):
    return {**measured, control: Timing((1.0,) * 5 + (2.0,) * 5, 1)}


@pytest.mark.parametrize(
    ("answers", "attempts", "loses", "disturbed"),
    [
        ([WINS], 1, False, False),
        ([LOSES, WINS], 2, False, False),
        ([LOSES, LOSES, WINS], 3, False, False),
        ([LOSES, LOSES, LOSES], 3, True, False),
        ([disturb(WINS), WINS], 2, False, False),
        ([disturb(WINS), disturb(WINS)], 2, False, True),
        ([disturb(WINS), LOSES, LOSES, WINS], 4, False, False),
        ([disturb(LOSES), LOSES, LOSES, LOSES], 4, True, False),
        ([LOSES, disturb(LOSES), LOSES, LOSES], 4, True, False),
    ],
)
def test_losing_and_disturbed_cells_are_measured_again(answers, attempts, loses, disturbed):
    script = Script(*answers)
    result = settle(CELL, script, retries=2)
    assert (result.attempts, result.loses, result.disturbed) == (attempts, loses, disturbed)
    assert not script.answers


def test_a_widely_spread_candidate_disturbs_its_cell():
    spread = {**WINS, "eager torch": Timing((9.0, 5.0, 14.0, 9.0, 15.0, 4.0), 1)}
    assert settle(CELL, Script(spread, WINS), retries=2).attempts == 2
    slight = {**WINS, "eager torch": Timing((9.0, 8.0, 10.0, 9.0, 10.0, 8.0), 1)}
    assert settle(CELL, Script(slight), retries=2).attempts == 1


def test_the_control_of_a_call_cell_is_torch_add():
    quiet = timings(add=1.0, op_torch=1.5)
    assert settle(CALL, Script(disturb(quiet, "add"), quiet), retries=2).attempts == 2


def results():
    script = Script(timings(add=2.0, op_torch=3.0), WINS, LOSES)
    return run([CALL, CELL, COPY_CELL], script, Policy(retries=0))


def test_json():
    machine = report.machine(2**25, 2**27)
    document = json.loads(json.dumps(report.to_dict(results(), machine, {"quick": True})))
    assert set(document) == {"schema", "machine", "settings", "cells", "losing", "ok"}
    assert document["schema"] == 1
    assert document["ok"] is False
    assert document["losing"] == [str(COPY_CELL)]
    assert {"cpu", "isa", "threads", "torch", "load_average"} <= set(document["machine"])
    call, forward, _ = document["cells"]
    assert (
        set(call)
        == set(forward)
        == {
            "kind",
            "shape",
            "dtype",
            "buffers",
            "output",
            "grad_mode",
            "attempts",
            "disturbed",
            "limit",
            "timings",
            "comparisons",
            "loses",
        }
    )
    assert forward["shape"] == [8, 4096]
    assert forward["limit"] == "memcpy"
    assert call["limit"] is None
    assert forward["timings"]["ours torch"] == {
        "median_us": 2.0,
        "mad_us": 0.0,
        "rounds": 6,
        "calls": 1,
    }
    assert call["comparisons"] == [
        {"ours": "op torch", "rival": "add", "ratio": 1.5, "limit": 1.9, "ok": True}
    ]


def test_tables_and_summary_print_ratios():
    found = results()
    (call,) = report.call_rows(found)
    assert call[3:] == ("3.00", "2.00", "1.50", "1.9", "")
    assert len(call) == len(report.CALL_COLUMNS)
    rows = report.forward_rows(found)
    assert all(len(row) == len(report.FORWARD_COLUMNS) for row in rows)
    assert rows[0][4:] == ("torch", "2.00", "2.22", "4.50", "2.00", "-", "")
    # The copy limit is broken by both specs, the compiled peer by one.
    assert [row[-1] for row in rows] == ["", "", "LOSES", "LOSES"]
    text = "\n".join(report.summary(found))
    assert "compiled llama / ours: 1.05 (geometric mean of 2 cells), smallest 0.83" in text
    assert f"loses: {COPY_CELL}: ours llama / compiled llama is 1.20, expected below 1" in text
    assert "2 of 3 cells hold, 1 lose" in text


def test_a_busy_machine_is_named():
    assert report.load_warning({"load_average": None}) is None
    assert "2.5" in report.load_warning({"load_average": 2.5})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_cells_are_timed(dtype):
    policy = Policy(sample_ns=1_000, budget_ns=1, min_rounds=2)
    bench = Bench(policy, Compiler(enabled=False), cache=2**20, rotating=4096)
    for buffers in ("hot", "rotating"):
        for output in ("fresh", "given"):
            found = bench.time_cell(Cell("forward", 2, 32, dtype, buffers, output))
            assert {"copy", "memcpy", "ours torch", "ours llama", "eager torch"} <= set(found)
            assert all(timing.median > 0 for timing in found.values())
    found = bench.time_cell(Cell("call", 1, 32, dtype, grad_mode="no_grad"))
    assert "add" in found


def test_a_wrong_result_is_not_timed(monkeypatch):
    import rmsnorm

    def wrong(x, weight=None, eps=None, *, spec="torch", out=None):
        return x * 2

    monkeypatch.setitem(vars(rmsnorm), "rms_norm", wrong)
    bench = Bench(Policy(), Compiler(enabled=False), cache=2**20, rotating=4096)
    with pytest.raises(WrongResultError, match="ours torch and eager torch differ by"):
        bench.time_cell(Cell("forward", 2, 32, "float32"))
