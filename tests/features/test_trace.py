"""Traces: they say what the engine did, can be read back, and can be looked at."""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from counting_executor import byte_tokenizer, make_engine, run

from nanoserve import LLM, SamplingParams
from nanoserve.cli.main import main
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.listeners import BlockListener
from nanoserve.engine.plan import Plan
from nanoserve.features.trace import start_trace
from nanoserve.features.trace.page import make_page
from nanoserve.features.trace.phases import chrome_trace, phases, step_end
from nanoserve.features.trace.reader import Pool, Trace, read_trace
from nanoserve.features.trace.recorder import HostCopies, SequenceTexts
from nanoserve.features.trace.whole_lines import WholeLines
from nanoserve.text.incremental_decoder import TokenTexts

NODE = shutil.which("node")


def record(path: Path, *requests: dict[str, Any], **options: Any) -> Trace:
    """The trace of an engine without a model that ran `requests` to their end."""
    engine = make_engine(trace=path, **{"block_size": 4, **options})
    with start_trace(engine):
        for number, request in enumerate(requests):
            engine.add_request(f"r{number}", **request)
        run(engine)
        engine.close()
    return read_trace(path)


def ask(prompt: list[int], max_tokens: int = 3, **params: Any) -> dict[str, Any]:
    return {"prompt": prompt, "params": SamplingParams(max_tokens=max_tokens, **params)}


# ---------------------------------------------------------------- what is recorded


def test_a_step_is_recorded_as_it_ran(tmp_path: Path) -> None:
    trace = record(
        tmp_path / "run.jsonl",
        ask(list(range(10)), max_tokens=3),
        ask([*range(9), 77], max_tokens=1),
        tokenizer=byte_tokenizer(),
        max_num_batched_tokens=12,
    )
    first, second = trace.steps[:2]
    assert (trace.header["block_size"], trace.header["num_kv_blocks"]) == (4, 64)
    assert [arrival["prompt"] for arrival in first["arrived"]] == [
        list(range(10)),
        [*range(9), 77],
    ]
    # The second request shares two blocks that this very step computes; two tokens are left of the
    # budget, and both of its own are computed.
    assert first["rows"] == [
        {
            "seq": 1, "kind": "prefill", "computed": 0, "new": 10, "hits": 0,
            "blocks": [1, 2, 3], "yields": True, "token": 10, "text": "\n",
        },
        {
            "seq": 2, "kind": "prefill", "computed": 8, "new": 2, "hits": 2,
            "blocks": [1, 2, 4], "yields": True, "token": 78, "text": "N",
        },
    ]  # fmt: skip
    assert (first["published"], first["evicted"]) == ([1, 2], [])
    assert first["finished"] == [{"seq": 2, "reason": "length", "stop_reason": None}]
    assert (first["admitted"], first["running"], first["waiting"]) == ([1, 2], [1], [])
    assert first["batch"]["num_tokens"] == 12 and first["batch"]["num_decode_rows"] == 0
    assert second["rows"] == [
        {
            "seq": 1, "kind": "decode", "computed": 10, "new": 1, "hits": 0,
            "blocks": [], "yields": True, "token": 11, "text": "\v",
        }
    ]  # fmt: skip
    assert [step["step"] for step in trace.steps] == [0, 1, 2] and trace.closed is not None
    assert all(min(step["times"].values()) >= 0 for step in trace.steps)


def test_the_token_that_ends_a_sequence_is_recorded_although_it_does_not_join_it(
    tmp_path: Path,
) -> None:
    requests = [ask([1, 2], max_tokens=9, stop_token_ids=[4]), ask([8], max_tokens=9)]
    trace = record(tmp_path / "run.jsonl", *requests, eos=frozenset({11}))
    tokens = {1: [], 2: []}
    for step in trace.steps:
        for row in step["rows"]:
            tokens[row["seq"]].append(row["token"])
    assert tokens == {1: [3, 4], 2: [9, 10, 11]}


def test_one_of_several_ends_of_sequence_is_recorded(tmp_path: Path) -> None:
    trace = record(tmp_path / "run.jsonl", ask([1, 2]), eos=frozenset({3, 5}))
    assert trace.steps[0]["rows"][0]["token"] == 3
    assert trace.steps[0]["finished"][0]["reason"] == "stop"


def test_texts_of_tokens_are_whole_characters_and_add_up() -> None:
    tokenizer = byte_tokenizer()
    text = "KV 块表 ✓"
    all_texts = TokenTexts(tokenizer.backend)
    texts = SequenceTexts(all_texts)
    pieces = [texts.next(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text and "\ufffd" not in pieces
    broken = SequenceTexts(all_texts)
    assert "\ufffd" in "".join(broken.next(token_id) for token_id in [200] * 40)
    assert SequenceTexts(None).next(7) == ""


def test_a_real_model_leaves_a_trace_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an earlier trace")
    question = [{"role": "user", "content": "块表是什么？"}]
    with LLM("tiny-qwen3", trace=path, num_kv_blocks=64) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=40, skip_special_tokens=False)
        output = llm.chat(question, greedy, use_tqdm=False)[0]
        assert len(read_trace(path).steps) == llm.stats.num_steps  # while it is being written
    trace = read_trace(path)
    assert trace.header["model"] == "tiny-qwen3" and trace.closed is not None
    (arrival,) = trace.steps[0]["arrived"]
    assert arrival["prompt"] == output.prompt_token_ids
    assert "".join(arrival["texts"]) == output.prompt
    answer = "".join(row.get("text", "") for step in trace.steps for row in step["rows"])
    assert output.outputs[0].text and answer.startswith(output.outputs[0].text)


def test_without_the_option_nothing_observes(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer_init=True) as llm:
        assert llm.engine.observers == []


def test_a_trace_shows_one_step_at_a_time(tmp_path: Path) -> None:
    """With a step ahead, the pool would be that of the step after the one that is written."""
    path = tmp_path / "run.jsonl"
    for make in (EngineConfig, LLM):
        with pytest.raises(ValueError, match=r"trace=.*run\.jsonl.* async_scheduling=False"):
            make("tiny-qwen3", trace=path, async_scheduling=True)
    assert not path.exists()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no/such/folder/run.jsonl", "folder no/such/folder does not exist"),
        (".", "is a folder"),
        ("", "is a folder"),
        (7, "trace=7"),
        ("/proc/version", "cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(path: Any, told: str, monkeypatch) -> None:
    if path == "/proc/version":  # to the super-user everything looks writable
        monkeypatch.setattr("os.access", lambda *args: False)
    with pytest.raises(ValueError, match=told):
        EngineConfig("none", trace=path)
    with pytest.raises(ValueError, match=told):
        LLM("tiny-qwen3", trace=path)


# ---------------------------------------------------------------- a disk that is full


@pytest.fixture
def no_file_grows_beyond() -> Iterator[Callable[[int], None]]:
    """As on a full disk: what fits in is written, and then nothing is."""
    resource = pytest.importorskip("resource", reason="a limit of POSIX systems")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_trace_that_cannot_grow_ends_and_costs_no_result(
    tmp_path: Path, no_file_grows_beyond: Callable[[int], None], caplog
) -> None:
    path = tmp_path / "run.jsonl"
    whole = record(path, ask([1, 2, 3], max_tokens=40))
    lines = path.read_bytes().splitlines(keepends=True)
    no_file_grows_beyond(len(b"".join(lines[:9])) + 100)
    engine = make_engine(trace=path, block_size=4)
    with start_trace(engine):
        engine.add_request("r0", **ask([1, 2, 3], max_tokens=40))
        (output,) = run(engine).values()  # raises nothing
        engine.close()
    assert output.outputs[0].token_ids == list(range(4, 44))
    trace = read_trace(path)
    assert [step["rows"] for step in trace.steps] == [step["rows"] for step in whole.steps[:8]]
    assert trace.closed is None and trace.cut_off_line is None
    (warning,) = (message for message in caplog.messages if str(path) in message)
    assert "File too large" in warning


def test_a_trace_without_memory_for_a_step_ends_there(tmp_path: Path, caplog) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(trace=path)
    with start_trace(engine):
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=9))
        engine.step()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(json, "dumps", raise_memory_error)
            engine.step()
        run(engine)
        engine.close()
    trace = read_trace(path)
    assert len(trace.steps) == 1 and trace.closed is None
    assert len(caplog.messages) == 1 and "MemoryError" in caplog.text


def raise_memory_error(*args: object, **options: object) -> None:
    raise MemoryError


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk of Linux that is always full")
def test_a_trace_that_cannot_begin_is_refused() -> None:
    engine = make_engine(trace="/dev/full")
    with pytest.raises(OSError, match="No space left"):
        start_trace(engine)
    assert engine.observers == []


def test_a_line_that_is_interrupted_is_written_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    with WholeLines(path) as file:
        file.append("first")
        whole = file._file

        class Interrupted:
            def __getattr__(self, name: str) -> Any:
                return getattr(whole, name)

            def write(self, data: memoryview) -> int:
                if len(data) < 5:
                    raise KeyboardInterrupt
                return whole.write(data[:4])

        file._file = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            file.append("second")
        file._file = whole
        file.append("third")
    assert path.read_bytes() == b"first\nthird\n"


def host_trace(path: Path) -> Trace:
    """The trace of two prompts in turns, in a pool that holds one of them."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 6, "block_size": 4}
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with LLM("tiny-qwen3", trace=path, kv_offloading_size=0.01, **options) as llm:
        for first in (100, 200, 100):
            llm.generate([[*range(first, first + 21)]], one, use_tqdm=False)
    return read_trace(path)


def test_copies_to_and_from_the_host_are_recorded(tmp_path: Path) -> None:
    first, second, third = host_trace(tmp_path / "run.jsonl").steps
    assert first["to_host"] == first["from_host"] == []
    assert sorted(second["to_host"]) == second["evicted"] and len(second["to_host"]) == 5
    assert sorted(third["to_host"]) == third["evicted"] and len(third["to_host"]) == 5
    (row,) = third["rows"]
    assert (row["computed"], row["new"], row["hits"]) == (20, 1, 5)
    assert sorted(third["from_host"]) == sorted(row["blocks"][:5])


def test_copies_of_a_step_that_failed_are_not_those_of_the_next() -> None:
    copies = HostCopies()
    plans = [Plan(0) for _ in range(4)]
    for number in (0, 1, 3):
        inputs = ForwardInputs(kv_transfers=KVTransfers([(number, 7)], []))
        copies.forward_inputs(plans[number], inputs)
    copies.forward_inputs(plans[2], ForwardInputs())
    assert copies.take(plans[1]).to_host == [(1, 7)]
    assert copies.take(plans[2]) == KVTransfers([], [])
    assert copies.take(plans[3]).to_host == [(3, 7)]
    assert not copies._noted


def test_without_a_host_tier_a_step_says_nothing_of_it(tmp_path: Path) -> None:
    trace = record(tmp_path / "run.jsonl", ask([1, 2, 3]))
    assert not any({"to_host", "from_host"} & step.keys() for step in trace.steps)


# ---------------------------------------------------------------- random runs


class TracedRun:
    """A random run of an engine without a model; every line is compared with the real pool."""

    def __init__(self, seed: int, path: Path) -> None:
        self.rng = rng = random.Random(seed)
        max_num_seqs = rng.randint(1, 6)
        self.engine: GuardedEngine = make_engine(
            trace=path,
            num_kv_blocks=rng.randint(8, 20),
            block_size=rng.randint(1, 4),
            max_model_len=8,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 2, 10]),
            long_prefill_token_threshold=rng.choice([0, 0, 2]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            enable_prefix_caching=rng.random() < 0.9,
            eos=frozenset({5}) if rng.random() < 0.3 else frozenset(),
        )
        self.closing: ExitStack = start_trace(self.engine)
        self.path, self.num_checked = path, 0
        self.pool = Pool()
        self.lost: set[int] = set()  # blocks that really left the cache since the last line
        self.seen = dict.fromkeys(("hits", "evicted", "preempted", "undone", "aborted"), 0)
        self.hidden_evictions = 0  # that no block table shows
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self._keys: dict[int, tuple[str, int]] = {}
        self._watch_evictions()

    def _watch_evictions(self) -> None:
        class Watcher(BlockListener):
            on_removed = staticmethod(lambda block, *args: self.lost.add(block))

        self.engine.scheduler.block_manager.listeners.append(Watcher())

    def run(self) -> None:
        to_arrive, num_arrived = self.rng.randint(2, 14), 0
        while num_arrived < to_arrive or self.engine.has_unfinished_requests():
            while num_arrived < to_arrive and self.rng.random() < 0.4:
                self._arrive(f"r{num_arrived}")
                num_arrived += 1
            if self.rng.random() < 0.06 and num_arrived:
                self.engine.abort_request(f"r{self.rng.randrange(num_arrived)}")
            if self.engine.has_unfinished_requests():
                self._step()
        self.closing.close()

    def _arrive(self, name: str) -> None:
        length = self.rng.randint(1, 7)
        first = self.rng.randint(0, 1)
        params = SamplingParams(
            n=self.rng.choice([1, 1, 2, 3]), max_tokens=self.rng.choice([1, 3, None])
        )
        by_priority = self.engine.config.scheduling_policy == "priority"
        priority = self.rng.randint(0, 2) if by_priority else 0
        self.engine.add_request(name, list(range(first, first + length)), params, priority)

    def _step(self) -> None:
        if self.rng.random() < 0.06:
            self.engine.executor.fail_next = True
            with pytest.raises(RuntimeError, match="on fire"):
                self.engine.step()
            self.lost |= self.pool.cached
            return
        outputs = self.engine.step()
        steps = read_trace(self.path).steps
        if len(steps) > self.num_checked:  # not if all that was left was to hand out an output
            self.num_checked = len(steps)
            self._check(steps[-1])
        for output in outputs:
            for completion in output.outputs:
                got = self.tokens.get((output.request_id, completion.index), [])
                assert got[: len(completion.token_ids)] == completion.token_ids
                assert len(got) - len(completion.token_ids) == (completion.finish_reason == "stop")

    def _check(self, step: dict[str, Any]) -> None:
        scheduler, pool = self.engine.scheduler, self.pool
        manager = scheduler.block_manager
        assert set(step["evicted"]) == self.lost & pool.cached
        self.lost.clear()
        taken = {block for row in step["rows"] for block in row["blocks"][row["hits"] :]}
        self.hidden_evictions += len(set(step["evicted"]) - taken)
        pool.advance(step)
        for row in step["rows"]:
            table = pool.tables[row["seq"]]
            assert len(table) * manager.block_size >= row["computed"] + row["new"]
        pool.release(step)
        counts = pool.ref_counts()
        assert [counts[block] for block in range(manager.num_blocks + 1)] == manager._ref_counts
        assert pool.cached == {b for b, is_cached in enumerate(manager.snapshot()) if is_cached}
        assert pool.tables == {seq.arrival: seq.block_table for seq in scheduler.running}
        assert step["running"] == [seq.arrival for seq in scheduler.running]
        assert step["waiting"] == [seq.arrival for seq in scheduler.waiting]
        assert step["batch"]["num_tokens"] == sum(row["new"] for row in step["rows"])
        self._count(step)

    def _count(self, step: dict[str, Any]) -> None:
        for arrival in step["arrived"]:
            self._keys[arrival["seq"]] = (arrival["request"], arrival["index"])
        for row in step["rows"]:
            self.seen["hits"] += row["hits"]
            if row["yields"]:
                self.tokens.setdefault(self._keys[row["seq"]], []).append(row["token"])
        for what in ("evicted", "preempted", "undone", "aborted"):
            self.seen[what] += len(step[what])


def test_the_rebuilt_pool_is_the_real_one_after_every_step_of_random_runs(
    tmp_path: Path, by_size: Callable[..., int]
) -> None:
    num_runs = by_size(50, 150, 1500)
    seen: dict[str, int] = {"hidden evictions": 0}
    for seed in range(num_runs):
        traced = TracedRun(seed, tmp_path / "run.jsonl")
        try:
            traced.run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
        seen["hidden evictions"] += traced.hidden_evictions
        for what, times in traced.seen.items():
            seen[what] = seen.get(what, 0) + times
    # The runs must be hard enough to mean something.
    assert min(seen.values()) > 0.05 * num_runs, seen


# ---------------------------------------------------------------- reading


def test_a_line_that_a_crash_cut_off_is_left_out_and_told(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    whole = record(path, ask([1, 2, 3]))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])
    trace = read_trace(path)
    assert trace.steps == whole.steps[:-1]
    assert (trace.closed, trace.cut_off_line) == (None, len(lines) - 1)
    look(path)
    assert f"line {len(lines) - 1} was cut off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b'{"format": "nanoserve', "is empty, or its first line was cut off"),
        (b'{"hello": 1}\n', "line 1: this is not the header"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b'HEADER\n{"step": 1, \n', "line 2 is not JSON"),
        (b"HEADER\n\xff\n", "line 2 is not JSON"),
        (b'HEADER\n{"rows": ' + b"[" * 10**5 + b"\n", "line 2 is not JSON"),
        (b'HEADER\n{"rows": ' + b"9" * 5000 + b"}\n", "line 2 is not JSON"),
        (b'HEADER\n{"rows": []}\n{"hello": 1}\n', "line 3: this is not a step"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content.replace(b"HEADER", b'{"format": "nanoserve-trace", "version": 2}'))
    with pytest.raises(ValueError, match=told):
        read_trace(path)
    assert told in look(path)


def look(*arguments: str | Path) -> str:
    """`nanoserve trace`; what it says when it refuses."""
    error = StringIO()
    with redirect_stderr(error):
        status = main(["trace", *map(str, arguments)])
    message = error.getvalue()
    assert not status or (message.startswith("nanoserve trace: ") and message.count("\n") == 1)
    return message


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    record(path, ask([1, 2, 3]))
    assert look(path) == ""
    assert "3 steps, 1 sequences, at most 2 of 64 KV blocks in use" in capsys.readouterr().out
    assert look(path, "--chrome", tmp_path / "chrome.json", "-o", tmp_path / "page.html") == ""
    assert (tmp_path / "run.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    host_trace(path)
    assert look(path) == ""
    assert "evicted, 10 copied to the host, 5 filled from it" in capsys.readouterr().out


def test_the_command_refuses_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, ask([1, 2, 3]))
    before = path.read_bytes()
    assert "No such file" in look(tmp_path / "missing.jsonl")
    assert "No such file" in look(path, "-o", tmp_path / "no" / "folder.html")
    assert "is the trace itself" in look(path, "-o", path)
    assert path.read_bytes() == before


# ---------------------------------------------------------------- phases, and Perfetto


def busy_trace(path: Path, num_requests: int = 50) -> Trace:
    """Requests with common beginnings in a small pool: all that can happen does."""
    rng = random.Random(1)
    common = [rng.randrange(256) for _ in range(60)]
    requests = []
    for _ in range(num_requests):
        own = [rng.randrange(256) for _ in range(rng.randint(5, 60))]
        requests.append(ask(common[: rng.randint(10, 60)] + own, max_tokens=rng.randint(10, 80)))
    options = {"block_size": 16, "num_kv_blocks": 40, "max_num_batched_tokens": 48}
    return record(path, *requests, tokenizer=byte_tokenizer(), **options)


def test_phases_follow_each_other_from_arrival_to_end(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path / "run.jsonl")
    spans_of = phases(trace)
    assert len(spans_of) == trace.num_sequences == 50
    seen = {span.phase for spans in spans_of.values() for span in spans}
    assert seen == {"waiting", "prefill", "decode", "preempted"}
    planned = [{row["seq"]: row["kind"] for row in step["rows"]} for step in trace.steps]
    for seq, spans in spans_of.items():
        assert spans[0].phase == "waiting" and spans[0].first == 0
        assert spans[-1].end == step_end(trace.steps[spans[-1].last])
        for span, following in pairwise(spans):
            assert (span.last + 1, span.end) == (following.first, following.start)
        for span in spans:
            assert span.start <= span.end
            for i in range(span.first, span.last + 1):
                runs = span.phase in ("prefill", "decode")
                assert planned[i].get(seq) == (span.phase if runs else None)


def test_an_abort_ends_a_phase(tmp_path: Path) -> None:
    engine = make_engine(trace=tmp_path / "run.jsonl")
    with start_trace(engine):
        for name in "abc":
            engine.add_request(name, [1, 2], SamplingParams(max_tokens=9))
        engine.step()
        engine.abort_request("a")
        engine.step()
        engine.close()
    trace = read_trace(tmp_path / "run.jsonl")
    assert [ended["seq"] for ended in trace.steps[1]["aborted"]] == [1]
    assert [ended["seq"] for ended in trace.closed["aborted"]] == [2, 3]
    assert [spans[-1].last for spans in phases(trace).values()] == [0, 1, 1]


def test_the_chrome_trace_has_tracks_that_nest(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path / "run.jsonl")
    events = json.loads(json.dumps(chrome_trace(trace)))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    timed = [event for event in events if event["ph"] != "M"]
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed))
    assert min(event["ts"] for event in timed) >= 0
    tracks: dict[tuple[int, int], list[float]] = {}
    for event in timed:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            open_until = tracks.setdefault((event["pid"], event["tid"]), [])
            while open_until and open_until[-1] <= event["ts"] + 0.11:  # they are rounded
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 0.11, event
            open_until.append(end)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(tracks) and len(tracks) == 51


# ---------------------------------------------------------------- the page


def data_of(page: str) -> str:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return data


def test_the_page_needs_nothing_else_and_is_small(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path / "run.jsonl")
    page = make_page(trace)
    assert len(page.encode()) < 3e6
    data = data_of(page)
    outside = page.replace(data, "")
    assert not re.findall(r"https?:|<link|\ssrc=|\shref=|@import|url\(|\{\{", outside)
    assert json.loads(data)["steps"] == trace.steps


def test_a_text_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- {{css}} \u2028 \udc80"
    engine = make_engine(trace=tmp_path / "run.jsonl", tokenizer=byte_tokenizer())
    with start_trace(engine):
        engine.add_request(evil, "</script>", SamplingParams(max_tokens=1))
        run(engine)
    page = make_page(read_trace(tmp_path / "run.jsonl"))
    assert page.count("</script>") == 2
    data = json.loads(data_of(page))
    assert data["steps"][0]["arrived"][0]["request"] == evil
    assert "".join(data["steps"][0]["arrived"][0]["texts"]) == "</script>"


def run_page(folder: Path, page: str, code: str, *pieces: str) -> Any:
    """Return the value that `code` prints as JSON after the page's program, without its drawing.

    `pieces`: patterns of further pieces of the program that the code needs.
    """
    (program,) = re.findall(r'<script type="module">\n(.*?)</script>', page, re.S)
    (folder / "data.json").write_text(data_of(page), encoding="utf-8")
    script = [
        "const text = require('fs').readFileSync('data.json', 'utf8');",
        "const document = { getElementById: () => ({ textContent: text }) };",
        program.partition("- drawing")[0],
        *(re.findall(piece, program, re.S)[0] for piece in pieces),
        code,
    ]
    shown = subprocess.run(
        [NODE, "-"],
        input="\n".join(script),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(shown.stdout)


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node")
def test_the_page_rebuilds_the_same_pool(tmp_path: Path) -> None:
    trace = busy_trace(tmp_path / "run.jsonl")
    code = (
        "const states = steps.map((_, i) => stateAt(i));"
        "console.log(JSON.stringify(states.map((s) => [[...s.tables], [...s.cached]])));"
    )
    states = run_page(tmp_path, make_page(trace), code)
    pool = Pool()
    for step, (tables, cached) in zip(trace.steps, states, strict=True):
        pool.advance(step)
        assert dict(tables) == pool.tables
        assert set(cached) == pool.cached
        pool.release(step)


@pytest.mark.skipif(NODE is None, reason="the page's program runs outside a browser with node")
def test_the_page_knows_what_a_block_from_the_host_holds(tmp_path: Path) -> None:
    """Not what it held before."""
    trace = host_trace(tmp_path / "run.jsonl")
    code = (
        "const current = 2;"
        "console.log(JSON.stringify([[...stateAt(2).contents], storyOf(steps[2])]));"
    )
    pieces = r"const plural = .*?;\n", r"function storyOf.*?\n}\n"
    contents, told = run_page(tmp_path, make_page(trace), code, *pieces)
    (row,) = trace.steps[2]["rows"]
    for index, block in enumerate(row["blocks"]):
        expected = {"seq": row["seq"], "index": index, "isHit": index < 5}
        assert dict(contents)[block] == expected
    assert "with 20 tokens from the host." in told
    assert "Copied to the host: 5 blocks. Filled from the host: 5 blocks." in told
