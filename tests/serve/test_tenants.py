"""Several keys on one server: what each of them can see, over a socket to `octavo serve` and in frames."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.errors import ParameterError
from octavo.serve.args import ServeArgs
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.launcher import load_keys
from octavo.serve.tenants import OTHER_TENANT, Tenant
from octavo.view.live.messages import Frame
from octavo.view.live.state import PoolState
from tests.serve.http.test_server import Process, call

ONE, TWO, ADMIN = "sk-one", "sk-two", "sk-admin"
LONG: dict[str, Any] = {"prompt": "Hello, hello, hello, hello", "max_tokens": 90, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Keys one and two from options, an admin key from the environment, and a pinned prefix for each tenant."""
    prefix = tmp_path_factory.mktemp("pins") / "secret.txt"
    prefix.write_text("Once upon a time there was a prefix of some length")
    options = ["--api-key", ONE, "--api-key", TWO, "--served-model-name", "tiny", "--view-text", "--block-size", "4"]
    options += ["--num-gpu-blocks-override", "120", "--max-num-seqs", "4", "--pin-prefix", str(prefix)]
    with Process.serving(model, *options, OCTAVO_ADMIN_KEY=ADMIN) as (_, url):
        yield url


class Watching(threading.Thread):
    """A viewer of /view/events that keeps its state and all received data."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(daemon=True)
        parts = urllib.parse.urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        self.connection.request("GET", "/view/events", headers={"authorization": f"Bearer {key}"})
        self.sock = self.connection.sock
        self.answer = self.connection.getresponse()
        self.frames: list[bytes] = []
        self.state: PoolState | None = None
        self.wrong: Exception | None = None
        self.held: set[int] = set()
        self.start()
        while self.state is None and self.is_alive():
            time.sleep(0.01)

    def run(self) -> None:
        try:
            for line in self.answer:
                if line.startswith(b"data: "):
                    self._process(line.removeprefix(b"data: "))
        except Exception as error:
            self.wrong = error

    def close(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.join(30)
        self.answer.close()
        self.connection.close()
        assert self.wrong is None or isinstance(self.wrong, (OSError, http.client.HTTPException)), self.wrong

    def _process(self, data: bytes) -> None:
        self.frames.append(data)
        frame = msgspec.json.decode(data, type=Frame)  # type: ignore[arg-type]
        if self.state is None:
            self.state = PoolState(frame)
        else:
            self.state.apply(frame)
        for table in list(self.state.tables.values()):
            self.held |= {block for block in table.block_ids.tolist() if block > 0}

    @property
    def received_text(self) -> str:
        return b"".join(self.frames).decode()


@contextlib.contextmanager
def watching(url: str, *keys: str) -> Iterator[list[Watching]]:
    viewers = [Watching(url, key) for key in keys]
    try:
        yield viewers
    finally:
        for viewer in viewers:
            viewer.close()


def ask(url: str, path: str, key: str) -> Any:
    status, body = call(url + path, key=key)
    return json.loads(body) if status == 200 else (status, json.loads(body)["error"]["code"])


def busy(url: str, key: str, count: int = 1) -> list[threading.Thread]:
    """Long requests."""
    body = {**LONG, "n": 2, "temperature": 1}

    def complete() -> None:
        status, answer = call(f"{url}/v1/completions", body, key)
        assert status == 200, answer

    threads = [threading.Thread(target=complete) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_key_sees_its_own_requests_and_admin_key_sees_all(server: str) -> None:
    for key in (ONE, TWO):  # the last blocks of each stay cached
        assert call(f"{server}/v1/completions", {**LONG, "max_tokens": 4}, key)[0] == 200
    with watching(server, ONE, TWO, ADMIN) as viewers:
        one, two, admin = viewers
        seen: dict[str, set[str]] = {ONE: set(), TWO: set(), ADMIN: set()}
        threads = busy(server, ONE, 3) + busy(server, TWO, 3)
        while any(thread.is_alive() for thread in threads):
            for key in seen:
                kv = ask(server, "/debug/kv", key)
                seen[key] |= set(kv["requests"])
                assert ("other_tenants" in kv) is (key != ADMIN)
            time.sleep(0.01)
        while any(r.status != "pinned" for v in viewers if v.state for r in list(v.state.requests.values())):
            time.sleep(0.01)
        ids = {key: {name for name in names if not name.startswith("pin:")} for key, names in seen.items()}
        assert ids[ONE] and ids[TWO] and not ids[ONE] & ids[TWO]
        assert ids[ADMIN] & ids[ONE] and ids[ADMIN] & ids[TWO]

        # Timelines
        for name in ids[ONE]:
            assert ask(server, f"/debug/requests/{name}", ONE)["request_id"] == name
            assert ask(server, f"/debug/requests/{name.removeprefix('cmpl-')}", ONE)["request_id"] == name
            assert ask(server, f"/debug/requests/{name}", ADMIN)["request_id"] == name
            assert ask(server, f"/debug/requests/{name}", TWO) == (404, "not_found")
            assert not any(other in json.dumps(ask(server, f"/debug/requests/{name}", ONE)) for other in ids[TWO])

        # The stream
        for own, other in ((one, TWO), (two, ONE)):
            assert own.state is not None and admin.state is not None
            assert not any(name in own.received_text for name in ids[other])
            assert any(name in own.received_text for name in ids[ONE if other == TWO else TWO])
            assert np.array_equal(own.state.words, admin.state.words) and own.state.stats == admin.state.stats
            assert own.state.counts == admin.state.counts
        assert all(name in admin.received_text for name in ids[ONE] | ids[TWO] if name in ids[ADMIN])

        # Blocks
        cached = np.nonzero(admin.state.words)[0].tolist()
        assert cached
        for block in cached:
            of = {key: ask(server, f"/view/blocks/{block}", key) for key in (ONE, TWO, ADMIN)}
            assert of[ADMIN]["text"] and of[ADMIN]["token_ids"] and of[ADMIN]["name"]
            texts = [key for key in (ONE, TWO) if of[key].get("text") or of[key]["token_ids"] or of[key]["name"]]
            assert len(texts) <= 1
            for key, viewer in ((ONE, one), (TWO, two)):
                if key in texts:
                    assert block in viewer.held and of[key]["text"] == of[ADMIN]["text"]
                    assert of[key]["seal_id"] == of[ADMIN]["seal_id"]
                else:
                    anonymous = (of[key]["seal_id"], of[key]["parent_id"], of[key]["owners"], of[key]["sealed"])
                    assert anonymous == (0, 0, [], True)
        assert {key for block in cached for key in (ONE, TWO) if ask(server, f"/view/blocks/{block}", key)["text"]} == {
            ONE,
            TWO,
        }


def test_other_tenants_pins_are_hidden(server: str) -> None:
    pins = {key: set(map(str, _pins(server, key))) for key in (ONE, TWO, ADMIN)}
    assert len(pins[ONE]) == len(pins[TWO]) == 1 and not pins[ONE] & pins[TWO]
    assert pins[ADMIN] == pins[ONE] | pins[TWO]


def _pins(server: str, key: str) -> list[str]:
    with watching(server, key) as (viewer,):
        assert viewer.state is not None
        return [name for name, request in viewer.state.requests.items() if request.status == "pinned"]


def test_only_admin_keys_are_shown_as_admin(server: str) -> None:
    assert ask(server, "/view/config", ONE)["only_own"] is True
    assert ask(server, "/view/config", ADMIN)["only_own"] is False
    assert call(f"{server}/v1/completions", {**LONG, "max_tokens": 1}, ADMIN)[0] == 200
    metrics = call(f"{server}/metrics", key=ONE)[1]
    assert b"vllm:" in metrics and b"sk-" not in metrics and b"cmpl-" not in metrics


def test_server_has_no_playground(server: str) -> None:
    """A history of 157 bytes could take seconds of the API process."""
    play = {"history": "4096x16;new,65536;" + "fork,A,63;" * 10 + "free,A"}
    begin = time.monotonic()
    for key in (ONE, ADMIN):
        status, body = call(f"{server}/view/play", play, key)
        assert (status, json.loads(body)["error"]["code"]) == (404, "unsupported_endpoint")
        assert "octavo view" in json.loads(body)["error"]["message"]
        assert ask(server, "/view/play/lessons", key)[0] == 404
        assert ask(server, "/view/config", key)["uses"] == ["live"]
    assert time.monotonic() - begin < 60


# -- without a server --------------------------------------------------------------------------------------------------


def test_holder_of_the_only_key_sees_all() -> None:
    for keys in (ApiKeys(["one"]), ApiKeys(["one", "one"]), ApiKeys([], ["one"])):
        found = keys.find(b"one")
        assert found == Tenant(b"", sees_all=True) and keys.has_operator and keys.users == (found,)
        assert keys.find(b"two") is None
    assert ApiKeys([]).has_operator and not ApiKeys([]) and ApiKeys([]).users == (Tenant(),)


def test_only_admin_keys_of_several_see_all() -> None:
    keys = ApiKeys(["one", "two"], ["root"])
    one, two, root = (keys.find(key) for key in (b"one", b"two", b"root"))
    assert one is not None and two is not None and root is not None
    assert (one.sees_all, two.sees_all, root.sees_all) == (False, False, True)
    assert len({one.salt, two.salt, root.salt, b""}) == 4 and set(keys.users) == {one, two}
    assert keys.salts() == {one.salt, two.salt}
    assert not ApiKeys(["one", "two"]).has_operator
    one_and_root = ApiKeys(["one"], ["root"]).find(b"one")
    assert one_and_root is not None and not one_and_root.sees_all
    with pytest.raises(ParameterError, match="both api_key and admin_key"):
        ApiKeys(["one"], ["one"])


def test_request_id_identifies_its_tenant() -> None:
    one, two, root = Tenant(b"1" * 16, sees_all=False), Tenant(b"2" * 16, sees_all=False), Tenant(b"3" * 16)
    ids = [one.new_request_id() for _ in range(100)]
    assert len(set(ids)) == 100 and all(len(name) == 32 and int(name, 16) >= 0 for name in ids)
    for name in ids:
        for shape in (name, f"cmpl-{name}", f"chatcmpl-{name}", f"resp_{name}", f"cmpl-{name}-12"):
            assert (one.sees(shape), two.sees(shape), root.sees(shape)) == (True, False, True)
        flipped = name[:-1] + "0123456789abcdef"[int(name[-1], 16) ^ 1]
        assert not one.sees(flipped)
        for wrong in (name[:-1], name + "0", f"x{name}", f"cmpl-{name}-", f"cmpl-{name}-x", name.upper() + "g", ""):
            assert not one.sees(wrong)
    pin = f"pin:{one.pin_name('a.txt')}"
    assert (one.sees(pin), two.sees(pin), root.sees(pin)) == (True, False, True)


def test_other_tenants_are_hidden_in_a_timeline() -> None:
    one, two = Tenant(b"1" * 16, sees_all=False), Tenant(b"2" * 16, sees_all=False)
    own, other = one.new_request_id(), two.new_request_id()
    entries = [{"event": "preempted", "for_request": name} for name in (own, other)]
    shown = one.redact_request({"timeline": entries})["timeline"]
    assert [entry["for_request"] for entry in shown] == [own, OTHER_TENANT]
    held = {"num_blocks": 3, "num_host_blocks": 1, "status": "running"}
    kv = one.redact_kv({"num_used": 6, "requests": {own: held, other: held}})
    assert kv["requests"] == {own: held} and kv["num_used"] == 6
    assert kv["other_tenants"] == {"num_requests": 1, "num_blocks": 3, "num_host_blocks": 1}


def test_admin_keys_come_from_options_a_file_and_the_environment(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("three\n")
    path.chmod(0o600)
    settings = ServeArgs(admin_key=["one"], admin_key_file=str(path))
    assert load_keys(settings, ["two"], name="admin_key") == ["one", "two", "three"]
    assert load_keys(settings) == []
    with pytest.raises(ParameterError, match="admin_key must be non-empty printable ASCII"):
        ServeArgs(admin_key=["a b"])
    with pytest.raises(ParameterError, match="cannot read admin_key_file"):
        load_keys(ServeArgs(admin_key_file=str(tmp_path / "none")), name="admin_key")
