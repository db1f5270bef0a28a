"""Pipes of a foreign process: all of its result, a share of its log, and neither without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.output import KEPT_OF_LOG, LARGEST_RESULT, SHOWN_OF_LOG, Output

FULL = f"an agent has printed {SHOWN_OF_LOG} bytes: more of this episode is not shown"


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """Lines on standard error."""
    lines: list[str] = []
    monkeypatch.setattr("rollouts.output.say", lines.append)
    return lines


Then = Callable[[Output, list[int]], None]


def read(result: list[bytes], log: list[bytes], *, stays: bool = False, then: Then | None = None, **how: Any) -> Output:
    """Let a process write these bytes. stays: it keeps its ends open. then: is given both ends at last."""
    output = Output(bytearray(), **how)
    mine = [os.dup(end) for end in output.far_ends]
    output.begin()

    def write(end: int, parts: list[bytes]) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(end, left) :]

    writers = [threading.Thread(target=write, args=one) for one in zip(mine, (result, log), strict=True)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if then is not None:
        then(output, mine)
    for end in () if stays else mine:
        os.close(end)
    asyncio.run(output.finish())
    for end in mine if stays else ():
        with pytest.raises(BrokenPipeError):
            os.write(end, b"late")
        os.close(end)
    return output


@pytest.mark.parametrize("stays", [False, True])
def test_result_and_log_are_read_to_the_end_also_if_the_process_stays(shown, stays):
    log = b"one\n\n\ttwo \x1b[31mred\xff\nthree"
    output = read([b"answer ", b"42\n"], [log], stays=stays)
    assert (output.result, output.is_too_long, bytes(output.log), output.printed) == (
        b"answer 42\n",
        False,
        log,
        len(log),
    )
    assert shown == ["one", "\ttwo \\x1b[31mred\\xff", "three"]


@pytest.mark.parametrize("length", [100, 1000, SHOWN_OF_LOG // 2 - 1, SHOWN_OF_LOG - 1, SHOWN_OF_LOG])
def test_a_share_of_the_log_is_shown_and_the_end_is_kept(shown, length):
    lines = [f"{n:05}".encode().rjust(length, b".") for n in range(2 * SHOWN_OF_LOG // length + 2)]
    whole = b"\n".join(lines)
    output = read([], [whole])
    assert (bytes(output.log), output.printed) == (whole[-KEPT_OF_LOG:], len(whole)) and output.result == b""
    expected: list[str] = []
    used = 0
    for line in lines:
        if used < SHOWN_OF_LOG:
            expected.append(line[: SHOWN_OF_LOG - used].decode())
            used += length + 1
    assert shown == [*expected[:-1], f"{expected[-1]}\n{FULL}"]


def test_a_line_without_an_end_is_shown_in_part(shown):
    whole = b"x" * (3 * SHOWN_OF_LOG)
    output = read([], [whole], whose="the judge")
    told = f"the judge has printed {SHOWN_OF_LOG} bytes: more of this episode is not shown"
    assert shown == [f"{'x' * SHOWN_OF_LOG}\n{told}"] and output.printed == len(whole)
    assert bytes(output.log) == b"x" * KEPT_OF_LOG


def test_the_next_episode_has_a_share_of_its_own(shown):
    fence = threading.Event()

    def then(output: Output, ends: list[int]) -> None:
        while output.printed < 2 * SHOWN_OF_LOG + 2:
            os.sched_yield()
        os.write(ends[0], b"the log is read\n")
        fence.wait()
        output.show_more()
        os.write(ends[1], b"again\n")

    read([], [b"x" * (2 * SHOWN_OF_LOG) + b"\n", b"\n"], then=then, deliver=lambda _: fence.set())
    assert shown[0].endswith(FULL) and shown[1:] == ["again"]


def test_a_closed_standard_error_ends_the_showing_alone(monkeypatch):
    tries: list[str] = []

    def fail(text: str) -> None:
        tries.append(text)
        raise OSError("closed")

    monkeypatch.setattr("rollouts.output.say", fail)
    output = read([b"5"], [b"one\ntwo\n"])
    assert tries == ["one"] and (bytes(output.log), output.result) == (b"one\ntwo\n", b"5")


@pytest.mark.parametrize("more", [0, 1])
def test_a_result_is_bounded(shown, more):
    output = read([b"r" * LARGEST_RESULT, b"s" * more], [])
    assert output.is_too_long == bool(more) and output.result == b"r" * len(output.result)
    # what is too long is discarded as it is read, in parts
    assert LARGEST_RESULT - more * 2**16 <= len(output.result) <= LARGEST_RESULT and shown == []


def test_lines_of_a_result_are_delivered_as_they_come(shown):
    lines: list[bytes] = []
    output = read([b"one\ntw", b"o\n\nrest"], [b"log\n"], deliver=lines.append)
    assert (lines, output.result, shown) == ([b"one", b"two", b""], b"rest", ["log"])
    lines.clear()
    read([b"r" * (LARGEST_RESULT + 1)], [], deliver=lines.append)
    assert len(lines) == 1 and set(lines[0]) == {ord("r")} and len(lines[0]) <= LARGEST_RESULT


def test_a_mebibyte_of_a_result_is_read_and_sixteen_kib_of_a_log_are_shown(shown):
    output = read([b"r" * 1_048_576], [b"x" * 20_000])
    assert not output.is_too_long and len(output.result) == 1_048_576
    assert len(shown[0].partition("\n")[0]) == 16_384 and len(output.log) == 4_096
    assert read([b"r" * 1_048_577], []).is_too_long


def begin(output: Output) -> list[int]:
    """Start to read. Return the ends of the process."""
    mine = [os.dup(end) for end in output.far_ends]
    output.begin()
    return mine


def test_the_last_line_is_shown_as_soon_as_the_process_ends(monkeypatch):
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr("rollouts.output.say", said.put)
    output = Output(bytearray())
    mine = begin(output)
    os.write(mine[1], b"the last words")
    for end in mine:
        os.close(end)
    assert said.get(timeout=10) == "the last words"
    asyncio.run(output.finish())


def test_what_was_written_before_an_episode_ends_is_read_after_it(shown):
    """The reader is busy with the first line then, and the process keeps its ends."""
    is_busy, is_free, lines = threading.Event(), threading.Event(), list[bytes]()

    def deliver(line: bytes) -> None:
        lines.append(line)
        is_busy.set()
        is_free.wait(10)

    output = Output(bytearray(), deliver)
    mine = begin(output)
    os.write(mine[0], b"one\n")
    assert is_busy.wait(10)
    os.write(mine[0], b"two\n")
    os.write(mine[1], b"told\n")

    async def finish() -> None:
        finishing = asyncio.create_task(output.finish())
        await asyncio.sleep(0)
        is_free.set()
        await finishing

    asyncio.run(finish())
    assert (lines, shown) == ([b"one", b"two"], ["told"])
    for end in mine:
        os.close(end)


def test_a_process_that_goes_on_writing_is_left_alone_in_the_end(shown):
    output = Output(bytearray())
    mine = begin(output)

    def write_on() -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(mine[1], b"x" * 2**12)

    writer = threading.Thread(target=write_on, daemon=True)
    writer.start()
    while not output.printed:  # or the end could come before the first byte
        os.sched_yield()
    asyncio.run(output.finish())
    writer.join(10)
    assert not writer.is_alive() and bytes(output.log) == b"x" * KEPT_OF_LOG
    for end in mine:
        os.close(end)


def test_a_line_without_an_end_is_not_part_of_the_next_episode(shown):
    fence = threading.Event()

    def then(output: Output, ends: list[int]) -> None:
        while output.printed < SHOWN_OF_LOG + 1:
            os.sched_yield()
        os.write(ends[0], b"the log is read\n")
        fence.wait()
        output.show_more()
        os.write(ends[1], b"again\n")

    read([], [b"x" * (SHOWN_OF_LOG + 1)], then=then, deliver=lambda _: fence.set())
    assert shown[0].endswith(FULL) and shown[1:] == ["again"]


def test_the_pipes_are_closed_in_the_end(shown):
    read([b"1"], [b"one\n"])
    before = len(os.listdir("/proc/self/fd"))
    for stays in (False, True):
        read([b"1"], [b"one\n"], stays=stays)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_end_that_is_closed_is_not_asked_about_again(shown, monkeypatch):
    """Or the thread would keep a core busy while the process goes on."""
    answers: list[set[int]] = []

    class Poll:
        def __init__(self) -> None:
            self.own = select.poll()
            self.register, self.unregister = self.own.register, self.own.unregister

        def poll(self) -> list[tuple[int, int]]:
            found = self.own.poll()
            answers.append({end for end, _ in found})
            return found

    monkeypatch.setattr("rollouts.output.select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    output = Output(bytearray())
    mine = begin(output)
    os.close(mine[0])
    for n in range(1, 6):
        os.write(mine[1], b"x")
        while output.printed < n:
            os.sched_yield()
    os.close(mine[1])
    asyncio.run(output.finish())
    assert [sum(end in told for told in answers) for end in (output._result_end, output._log_end)] == [1, 6]
    assert shown == ["xxxxx"]
