"""Framed messages over Unix sockets: whole, in order, bounded, and never leaking a descriptor."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from backends.sharedmem import MAX_DESCRIPTORS, BadMessage, Segment, arecv, asend, recv, send

if TYPE_CHECKING:
    from .conftest import Pair

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 4196


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 100])
def test_messages_come_whole_and_in_order(pair: Pair, data: bytes) -> None:
    for number in range(3):
        send(pair[0], data + bytes([number]))
    for number in range(3):
        assert recv(pair[1]) == (data + bytes([number]), [])


def test_empty_message(pair: Pair) -> None:
    send(pair[0], b"")
    send(pair[0], b"next")
    assert recv(pair[1]) == (b"", [])
    assert recv(pair[1]) == (b"next", [])


def test_descriptors_stay_with_their_message(pair: Pair) -> None:
    with Segment.create(SIZE, "one") as one, Segment.create(2 * SIZE, "two") as two:
        send(pair[0], b"none")
        send(pair[0], b"one", [one.fd])
        send(pair[0], b"", [two.fd, one.fd])
        assert recv(pair[1]) == (b"none", [])
        for expected, sizes in ((b"one", [SIZE]), (b"", [2 * SIZE, SIZE])):
            data, fds = recv(pair[1])
            assert data == expected
            assert [os.fstat(fd).st_size for fd in fds] == sizes
            assert not any(os.get_inheritable(fd) for fd in fds)
            for fd in fds:
                os.close(fd)


def test_as_many_descriptors_as_allowed_and_no_more(pair: Pair) -> None:
    with Segment.create(SIZE, "one") as one:
        send(pair[0], b"many", [one.fd] * MAX_DESCRIPTORS)
        data, fds = recv(pair[1])
        assert data == b"many" and len(fds) == MAX_DESCRIPTORS
        for fd in fds:
            os.close(fd)
        with pytest.raises(ValueError, match="9 descriptors"):
            send(pair[0], b"more", [one.fd] * (MAX_DESCRIPTORS + 1))


def raw(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def test_surplus_descriptors_are_closed(pair: Pair) -> None:
    with Segment.create(SIZE, "one") as one:
        raw(pair[0], struct.pack("!I", 1) + b"x", [one.fd] * 20)
        with pytest.raises(BadMessage, match="descriptors"):
            recv(pair[1])


def test_descriptors_dribbled_in_are_counted_together(pair: Pair) -> None:
    with Segment.create(SIZE, "one") as one:
        for byte in struct.pack("!I", 1):
            raw(pair[0], bytes([byte]), [one.fd] * 5)
        with pytest.raises(BadMessage, match="descriptors"):
            recv(pair[1])


def test_limit_comes_before_the_allocation(pair: Pair) -> None:
    with Segment.create(SIZE, "one") as one:
        raw(pair[0], struct.pack("!I", 0xFFFFFFFF), [one.fd])
        with pytest.raises(BadMessage, match="4294967295"):
            recv(pair[1])


def test_limit_is_inclusive(pair: Pair) -> None:
    send(pair[0], b"12345")
    assert recv(pair[1], limit=5) == (b"12345", [])
    send(pair[0], b"123456")
    with pytest.raises(BadMessage):
        recv(pair[1], limit=5)


def test_end_between_messages_and_within_one(pair: Pair) -> None:
    send(pair[0], b"last")
    with Segment.create(SIZE, "one") as one:
        raw(pair[0], struct.pack("!I", 10) + b"cut", [one.fd])
    pair[0].close()
    assert recv(pair[1])[0] == b"last"
    with pytest.raises(ConnectionError, match="within"):
        recv(pair[1])
    with pytest.raises(EOFError):
        recv(pair[1])


@pytest.mark.parametrize("sent", [b"\0", b"\0\0\0\5"])
def test_end_within_the_header_or_right_after(pair: Pair, sent: bytes) -> None:
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(ConnectionError, match="within"):
        recv(pair[1])


def test_send_to_nobody(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        send(pair[0], b"x")


def test_message_larger_than_the_socket_holds(pair: Pair) -> None:
    data = os.urandom(8 << 20)
    with Segment.create(SIZE, "one") as one:
        sender = threading.Thread(target=send, args=(pair[0], data, [one.fd]))
        sender.start()
        received, fds = recv(pair[1], limit=len(data))
        sender.join()
    assert received == data and len(fds) == 1
    os.close(fds[0])


def test_non_blocking_sockets_need_the_asynchronous_ones(pair: Pair) -> None:
    pair[1].setblocking(False)
    with pytest.raises(ValueError, match="arecv"):
        recv(pair[1])


async def test_asynchronous_both_ways_at_once(pair: Pair) -> None:
    for sock in pair:
        sock.setblocking(False)
    messages = [os.urandom(size) for size in (0, 10, 1 << 20, 5, 3 << 20)]

    async def send_all(sock: socket.socket) -> None:
        for message in messages:
            await asend(sock, message)

    async def receive_all(sock: socket.socket) -> list[bytes]:
        return [(await arecv(sock, limit=4 << 20))[0] for _ in messages]

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for sock in pair:
            tasks.create_task(send_all(sock))
        received = [tasks.create_task(receive_all(sock)) for sock in pair]
    assert [task.result() for task in received] == [messages, messages]


async def test_descriptors_go_once_with_a_message_sent_in_pieces(pair: Pair) -> None:
    for sock in pair:
        sock.setblocking(False)
    with Segment.create(SIZE, "one") as one:
        message = os.urandom(8 << 20)
        _, (data, fds) = await asyncio.gather(asend(pair[0], message, [one.fd]), arecv(pair[1], limit=8 << 20))
    assert data == message and len(fds) == 1
    os.close(fds[0])
    loop = asyncio.get_running_loop()
    assert not loop.remove_writer(pair[0]) and not loop.remove_reader(pair[1])  # both gave up watching


async def test_asynchronous_waits_carries_descriptors_and_sees_the_end(pair: Pair) -> None:
    for sock in pair:
        sock.setblocking(False)
    task = asyncio.create_task(arecv(pair[1]))
    await asyncio.sleep(0.01)
    assert not task.done()
    with Segment.create(SIZE, "one") as one:
        await asend(pair[0], b"here", [one.fd])
    data, (fd,) = await task
    with Segment.adopt(fd) as segment:
        assert (data, segment.size) == (b"here", SIZE)
    pair[0].close()
    with pytest.raises(EOFError):
        await arecv(pair[1])


async def test_cancelled_receive_closes_what_came(pair: Pair) -> None:
    pair[1].setblocking(False)
    with Segment.create(SIZE, "one") as one:
        raw(pair[0], struct.pack("!I", 10) + b"part", [one.fd])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(arecv(pair[1]), 0.05)
    pair[0].sendall(b"x" * 6)  # nobody waits for it any more
    await asyncio.sleep(0.01)


def test_a_peer_that_takes_nothing_is_given_up(pair: Pair) -> None:
    ours, _ = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    with pytest.raises(TimeoutError, match="takes nothing"):
        send(ours, bytes(16 << 20))
