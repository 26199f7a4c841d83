import json

import pytest
import torch

from rmsnorm.bench import report
from rmsnorm.bench.goals import HUGE_PAGES
from rmsnorm.bench.grid import SWEEP_WIDTHS, Cell
from rmsnorm.bench.limit import Candidate
from rmsnorm.bench.memory import Usage
from rmsnorm.bench.peers import Compiler
from rmsnorm.bench.run import Bench, Policy, Timing, WrongResultError, judge, measure, run, settle

CELL = Cell("forward", 8, 4096, "bfloat16")
CALL = Cell("call", 1, 4096, "bfloat16", grad_mode="no_grad")
TRAIN = Cell("train", 512, 4096, "bfloat16")
ADD = Cell("add", 8, 4096, "float32", "hot", "inplace")
TINY = Policy(sample_ns=1_000, budget_ns=8, min_rounds=2)
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
    found = [one for one in judge(COPY_CELL, measured) if one.limit.rival == "copy"]
    assert len(found) == 2
    assert all(one.ok for one in found) is ok


@pytest.mark.parametrize("fastest", ["copy", "memcpy", "stream"])
def test_the_physical_limit_is_the_fastest_copy(fastest):
    copies = dict.fromkeys(("copy", "memcpy", "stream"), 2.0) | {fastest: 1.0}
    measured = {**WINS, **timings(**copies, ours_torch=1.2, ours_llama=1.21)}
    found = {
        one.limit.ours: one for one in judge(COPY_CELL, measured) if one.limit.rival == "limit"
    }
    assert found["ours torch"].ratio == pytest.approx(1.2)
    assert found["ours torch"].ok
    assert found["ours llama"].ratio == pytest.approx(1.21)
    assert not found["ours llama"].ok


@pytest.mark.parametrize(
    ("rows", "eager", "compiled", "lost"),
    [
        (512, 4.0, 3.01, []),
        (512, 3.99, 3.01, ["eager torch"]),
        (32, 1.01, 3.01, []),
        (32, 1.0, 3.01, ["eager torch"]),
        (32, 4.0, 2.99, ["compiled torch"]),
        (8, 4.0, 1.01, []),
        (8, 4.0, 1.0, ["compiled torch"]),
    ],
)
def test_the_training_limits(rows, eager, compiled, lost):
    measured = {
        **timings(copy=1.0, ours_torch=1.0, eager_torch=eager, compiled_torch=compiled),
        **timings(ours_llama=1.0, eager_llama=1.1, compiled_llama=3.1),
    }
    found = judge(Cell("train", rows, 4096, "float32"), measured)
    assert len(found) == 4
    assert [one.limit.rival for one in found if not one.ok] == lost


ADD_WINS = timings(
    rewrite=1.0,
    ours_torch=2.0,
    separate_torch=3.0,
    eager_torch=8.0,
    compiled_torch=4.0,
    ours_llama=2.0,
    separate_llama=3.0,
    eager_llama=8.0,
)


def test_the_same_speed_as_the_separate_addition_loses():
    assert all(one.ok for one in judge(ADD, ADD_WINS))
    found = judge(ADD, {**ADD_WINS, **timings(separate_llama=2.0)})
    assert [one.limit.rival for one in found if not one.ok] == ["separate llama"]


def test_the_control_in_place_is_the_rewriting():
    assert settle(ADD, Script(disturb(ADD_WINS, "rewrite"), ADD_WINS), retries=2).attempts == 2


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


def test_the_control_of_every_kind_is_a_copy_or_an_addition():
    for cell, control in (
        (Cell("heads", 32768, 128, "float32"), "copy"),
        (Cell("sweep", 8, 2**20, "float32", "rotating", "given"), "copy"),
        (Cell("train", 4096, 4096, "float32", "hot", "recycled"), "copy"),
    ):
        widths = {f"ours d={d}": Timing((2.0,) * 6, 1) for d in SWEEP_WIDTHS}
        quiet = {**WINS, **timings(eager_torch=9.0, compiled_torch=7.0, compiled_llama=10.0)}
        quiet = {**quiet, **widths}
        assert settle(cell, Script(disturb(quiet, control), quiet), retries=0).attempts == 2


def test_what_the_system_lacks_is_not_asked():
    cell = Cell("forward", 4096, 4096, "float32", "hot", "fresh")
    measured = {**WINS, **timings(copy=2.0, memcpy=2.0)}  # ours is no faster than the clone
    assert any(not one.ok for one in judge(cell, measured))
    assert all(one.ok for one in judge(cell, measured, absent={HUGE_PAGES}))
    (found,) = run([cell], Script(measured), Policy(retries=0), absent={HUGE_PAGES})
    assert not found.loses


def test_the_kernel_is_what_the_call_leaves():
    (found,) = run([CELL], Script(WINS), overheads=lambda cell: {"ours torch": 0.5})
    assert found.kernel_us("ours torch") == 1.5
    assert found.kernel_us("ours llama") is None
    (found,) = run([CELL], Script(WINS), overheads=lambda cell: {"ours torch": 2.5})
    assert found.kernel_us("ours torch") == 0.0
    row = dict(zip(report.FORWARD_COLUMNS, report.forward_rows([found])[0], strict=True))
    assert (row["ours us"], row["call us"], row["kernel us"]) == ("2.00", "2.50", "0.00")


def test_the_overhead_is_measured_once_for_each_way_to_call():
    bench = Bench(TINY, Compiler(enabled=False), cache=2**20, rotating=4096)
    found = bench.overheads(Cell("forward", 512, 64, "float32", "rotating", "given"))
    assert {"ours torch", "ours llama", "eager torch"} <= set(found)
    assert all(median > 0 for median in found.values())
    assert bench.overheads(Cell("forward", 9, 64, "float32", "hot", "given")) is found
    assert bench.overheads(Cell("forward", 9, 64, "float32", "hot", "fresh")) is not found
    assert bench.overheads(CALL) == {}


def test_a_cell_without_a_figure_gets_half_the_time_at_first(monkeypatch):
    policies = []

    def measure_(candidates, buffers, policy, *, warm):
        policies.append(policy.budget_ns)
        return {}

    monkeypatch.setattr("rmsnorm.bench.run.measure", measure_)
    bench = Bench(Policy(), Compiler(enabled=False), cache=2**20, rotating=4096)
    cell = Cell("forward", 2, 32, "float32")
    for _ in range(2):
        bench.time_cell(cell)
    bench.time_cell(Cell("call", 1, 4096, "bfloat16"))
    full = Policy().budget_ns
    assert policies == [full // 2, full, full]


def results():
    script = Script(timings(add=2.0, op_torch=3.0), WINS, LOSES)
    return run([CALL, CELL, COPY_CELL], script, Policy(retries=0))


USAGES = (
    Usage("ours torch", 1000, 1001, 1002),
    Usage("ours llama", 1000, 1001, 1021),
    Usage("eager torch", 1000, 6500, None),
)


def test_json():
    machine = report.machine(2**25, 2**27)
    document = report.to_dict(results(), machine, {"quick": True}, USAGES)
    document = json.loads(json.dumps(document))
    fields = {"schema", "machine", "settings", "cells", "memory", "steps", "goals", "losing"}
    assert set(document) == {*fields, "ok"}
    assert document["schema"] == 3
    goal = {one["rival"]: one for one in document["goals"]}["copy"]
    assert goal["state"] in ("holds", "not measured")
    assert document["ok"] is False
    assert document["losing"] == [str(COPY_CELL), "memory of ours llama"]
    assert [usage["ok"] for usage in document["memory"]] == [True, False, True]
    assert document["memory"][1] == {
        "name": "ours llama",
        "y_and_dx_bytes": 1000,
        "resident_peak_bytes": 1021,
        "allocated_peak_bytes": 1001,
        "ratio": 1.021,
        "limit": 1.02,
        "ok": False,
    }
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
            "overheads_us",
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
    assert call[3:] == ("torch.ops", "3.00", "0.0%", "2.00", "1.50", "1.9", "")
    assert len(call) == len(report.CALL_COLUMNS)
    rows = report.forward_rows(found)
    assert all(len(row) == len(report.FORWARD_COLUMNS) for row in rows)
    assert rows[0][4:9] == ("torch", "2.00", "0.0%", "-", "-")
    assert rows[0][9:] == ("2.22", "4.50", "2.00", "-", "-", "-", "")
    # The copy limit is broken by both specs, the compiled peer by one.
    assert [row[-1] for row in rows] == ["", "", "LOSES", "LOSES"]
    text = "\n".join(report.summary(found))
    assert "forward: compiled llama / ours: 1.05 (geometric mean of 2 cells), smallest 0.83" in text
    assert f"loses: {COPY_CELL}: ours llama / compiled llama is 1.20, expected below 1" in text
    assert "2 of 3 cells hold, 1 lose" in text


def test_tables_of_training_and_addition():
    train = {**WINS, **timings(product=3.0, eager_torch=7.0, compiled_torch=3.0)}
    add_train = Cell("add_train", 8, 4096, "float32")
    found = run([TRAIN, ADD, add_train], Script(train, ADD_WINS, ADD_WINS), Policy(retries=0))
    rows = report.train_rows(found)
    assert all(len(row) == len(report.TRAIN_COLUMNS) for row in rows)
    assert rows[0] == (
        *("512x4096", "bfloat16", "hot", "fresh", "torch", "2.00", "0.0%", "-", "-"),
        *("2.22", "1.50", "3.50", "1.50", "LOSES"),
    )
    assert [row[-1] for row in rows] == ["LOSES", "LOSES"]
    rows = report.add_rows(found)
    assert all(len(row) == len(report.ADD_COLUMNS) for row in rows)
    assert rows[0][3:9] == ("inplace", "torch", "2.00", "0.0%", "-", "-")
    assert rows[0][9:] == ("2.00", "1.50", "4.00", "2.00", "-", "")
    assert rows[1][9:] == ("2.00", "1.50", "4.00", "-", "-", "")
    assert [row[3] for row in rows] == ["inplace", "inplace", "train", "train"]
    assert report.forward_rows(found) == []
    text = "\n".join(report.summary(found))
    assert "train: eager torch / ours: 3.50 (geometric mean of 1 cells)" in text
    assert "add: separate llama / ours: 1.50" in text
    assert "add train: separate llama / ours: 1.50" in text
    assert f"loses: {TRAIN}: ours torch / eager torch is 0.29, expected at most 0.25" in text
    assert "2 of 3 cells hold, 1 lose" in text


def test_the_memory_is_a_table_and_lines():
    rows = report.memory_rows(USAGES)
    assert all(len(row) == len(report.MEMORY_COLUMNS) for row in rows)
    assert [row[2:] for row in rows] == [
        ("1.002", "1.001", "1.02", ""),
        ("1.021", "1.001", "1.02", "LOSES"),
        ("6.500", "6.500", "", ""),
    ]
    assert report.summary([], USAGES) == [
        "memory: ours torch / (y + dx): 1.002 (limit 1.02)",
        "memory: ours llama / (y + dx): 1.021 (limit 1.02)",
        "memory: eager torch / (y + dx): 6.500",
        "loses: memory: ours llama needs 1.021 of y + dx, expected at most 1.02",
    ]


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
        found = bench.time_cell(Cell("train", 2, 32, dtype, buffers))
        assert {"copy", "memcpy", "ours torch", "ours llama", "eager llama"} <= set(found)
        found = bench.time_cell(Cell("add_train", 2, 32, dtype, buffers))
        assert {"copy", "memcpy", "ours torch", "separate torch", "eager llama"} <= set(found)
        for output, control in (("fresh", "copy"), ("inplace", "rewrite")):
            found = bench.time_cell(Cell("add", 2, 32, dtype, buffers, output))
            assert {control, "ours torch", "separate torch", "eager llama"} <= set(found)
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


@pytest.mark.parametrize("output", ["fresh", "inplace"])
def test_a_wrong_sum_is_not_timed(monkeypatch, output):
    import rmsnorm

    right = rmsnorm.add_rms_norm

    def wrong(x, residual, *arguments, **keywords):
        y, total = right(x, residual, *arguments, **keywords)
        return y, total + 1

    monkeypatch.setitem(vars(rmsnorm), "add_rms_norm", wrong)
    bench = Bench(Policy(), Compiler(enabled=False), cache=2**20, rotating=4096)
    with pytest.raises(WrongResultError, match="ours torch and eager torch differ by 1"):
        bench.time_cell(Cell("add", 2, 32, "float32", "hot", output))


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    import rmsnorm

    right = rmsnorm.rms_norm

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(context, y):
            return y.clone()

        @staticmethod
        def backward(context, dy):
            return dy * 1.1

    def wrong(*arguments, **keywords):
        return Wrong.apply(right(*arguments, **keywords))

    monkeypatch.setitem(vars(rmsnorm), "rms_norm", wrong)
    bench = Bench(Policy(), Compiler(enabled=False), cache=2**20, rotating=4096)
    with pytest.raises(WrongResultError, match="ours torch and eager torch differ by"):
        bench.time_cell(Cell("train", 2, 32, "float32"))


def test_a_wrong_peer_is_not_timed_either(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: lambda x, weight: x)
    bench = Bench(Policy(), Compiler(), cache=2**20, rotating=4096)
    with pytest.raises(WrongResultError, match="compiled torch and eager torch differ by"):
        bench.time_cell(Cell("forward", 2, 32, "float32"))
