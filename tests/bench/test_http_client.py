"""The load's HTTP client against servers that keep to the protocol, and against others."""

from __future__ import annotations

import asyncio

import pytest

from octavo.bench.http_client import HTTPClient, LostConnectionError
from tests.bench.servers import chunked, read_request, scripted, whole
from tests.serve.in_process_server import run


def test_a_connection_is_used_again_and_pieces_come_as_they_are_sent() -> None:
    connections, asked, pieces = 0, [], []
    seen = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        asked.append(await read_request(reader))
        writer.write(whole({"a": 1}))
        asked.append(await read_request(reader))
        answer = chunked(b"first", b"second")
        cut = answer.index(b"second")
        writer.write(answer[:cut])
        await seen.wait()  # the rest waits for the client to have had the first piece
        writer.write(answer[cut:])
        asked.append(await read_request(reader))
        writer.write(whole(b"no", "404 Not Found"))

    def take(piece: bytes) -> None:
        pieces.append(piece)
        seen.set()

    async def main() -> None:
        async with scripted(script) as url:
            client = HTTPClient(url + "/under", {"X-Of-Ours": "yes"})
            answer = await client.get("/v1/models")
            assert (answer.status, answer.body) == (200, b'{"a": 1}')
            answer = await client.post("/v1/completions", b'{"n": 2}', take)
            assert (answer.status, bytes(answer.body)) == (200, b"")
            answer = await client.post("/v1/completions", b"{}", take)
            assert (answer.status, bytes(answer.body)) == (404, b"no")
            client.close()

    run(main())
    assert pieces == [b"first", b"second"] and connections == 1
    assert asked == [
        ("GET /under/v1/models", None),
        ("POST /under/v1/completions", {"n": 2}),
        ("POST /under/v1/completions", {}),
    ]


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    """The server hangs up as the next request arrives: that one goes out once more, over a new connection."""
    asked = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await read_request(reader))
        writer.write(whole(b"yes"))
        asked.append(await read_request(reader))

    async def main() -> None:
        async with scripted(script) as url:
            client = HTTPClient(url)
            for path in ("/1", "/2", "/3"):
                assert (await client.get(path)).body == b"yes"
            client.close()

    run(main())
    assert [path for path, _ in asked] == ["GET /1", "GET /2", "GET /2", "GET /3", "GET /3"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "without a response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "ended before the response"),
        (chunked(b"half", end=False), "ended before the response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not HTTP"),
    ],
)
def test_invalid_responses(answer: bytes, message: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    async def main() -> None:
        async with scripted(script) as url:
            with pytest.raises(LostConnectionError, match=message):
                await HTTPClient(url).get("/")

    run(main())


def test_an_answer_that_ends_with_its_connection() -> None:
    """As servers of HTTP/1.0 have it."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall ")
        await writer.drain()
        writer.write(b"of it")

    async def main() -> None:
        async with scripted(script) as url:
            client = HTTPClient(url)
            for _ in range(2):
                assert (await client.get("/")).body == b"all of it"
            client.close()

    run(main())


def test_connection_refused() -> None:
    async def main() -> None:
        async with scripted(read_request) as url:  # type: ignore[arg-type]
            pass
        with pytest.raises(LostConnectionError, match="no connection to 127"):
            await HTTPClient(url).get("/")

    run(main())


def test_who_is_cancelled_hangs_up() -> None:
    hung_up = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        begun.set()
        await reader.read()
        hung_up.set()

    async def main() -> None:
        async with scripted(script) as url:
            asking = asyncio.ensure_future(HTTPClient(url).get("/"))
            await begun.wait()
            asking.cancel()
            await hung_up.wait()

    begun = asyncio.Event()
    run(main())
    assert hung_up.is_set()
