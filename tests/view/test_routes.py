"""The view without a server: its files, the playground, and recordings."""

from __future__ import annotations

import base64
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from octavo.serve.view_routes import HEADERS, STATIC, View
from octavo.serve.view_server import ViewApp
from octavo.view.recording.frames import Replay
from tests.serve.in_process_server import run
from tests.view.recording.test_frames import recorded


@contextlib.asynccontextmanager
async def alone(view: View) -> Any:
    app = ViewApp(view)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
        yield client


def test_only_known_files_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "static" / "more").mkdir(parents=True)
    for name in ("index.html", "a.mjs", "more/b.css", "secret.txt"):
        (tmp_path / "static" / name).write_text(name)
    (tmp_path / "outside.html").write_text("outside")
    monkeypatch.setattr("octavo.serve.view_routes.STATIC", tmp_path / "static")

    async def main() -> None:
        async with alone(View("x")) as client:
            for path in ("/view", "/"):
                moved = await client.get(path)
                assert (moved.status_code, moved.headers["location"]) == (307, "view/")
            index = await client.get("/view/")
            assert index.text == "index.html" and HEADERS.items() <= dict(index.headers).items()
            policy = index.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors" in policy
            assert (await client.get("/view/static/a.mjs")).headers["content-type"] == "text/javascript; charset=utf-8"
            assert (await client.get("/view/static/more/b.css")).text == "more/b.css"
            for path in ("secret.txt", "", "none.html", "../outside.html", "%2e%2e/outside.html", "/etc/passwd.html"):
                answer = await client.get(f"/view/static/{path}")
                assert answer.status_code == 404, path

    run(main())


def test_page_files_exist() -> None:
    assert STATIC.is_dir()


def test_only_local_host_headers_are_accepted() -> None:
    async def main() -> None:
        async with alone(View()) as client:
            for host, status in [
                ("localhost:8000", 200),
                ("127.0.0.1", 200),
                ("[::1]:80", 200),
                ("[::1]", 200),
                ("example.org", 403),
                ("127.0.0.1.example.org:80", 403),
                ("", 400),
            ]:
                assert (await client.get("/view/config", headers={"host": host})).status_code == status, host
            other = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
            assert (await client.get("/view/config", headers=other)).status_code == 403
            link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
            assert (await client.get("/view/config", headers=link)).status_code == 200
            assert (await client.get("/view/events")).status_code == 404  # nothing runs here
            assert (await client.get("/view/replay")).status_code == 404

    run(main())


def test_playground_routes() -> None:
    async def main() -> None:
        async with alone(View()) as client:
            lessons = (await client.get("/view/play/lessons")).json()
            assert [lesson["id"] for lesson in lessons][:2] == ["fragmentation", "bytes"]
            body = {"history": "64x16;new,64", "action": "fork,A,3"}
            answer = (await client.post("/view/play", json=body)).json()
            assert answer["history"] == "64x16;new,64;fork,A,3" and answer["names"] == dict(
                zip("1234", "ABCD", strict=True)
            )
            assert answer["picture"]["kind"] == "snapshot" and answer["compare"]["paged_blocks"] == 4
            words = np.frombuffer(base64.b64decode(answer["picture"]["words"]), "<u2")
            assert words.tolist() == [0x8004] * 4 + [0] * 60
            for wrong in ({}, {"history": 3}, {"history": "x"}, {"history": "64x16", "action": []}):
                refused = await client.post("/view/play", json=wrong)
                param = "action" if "action" in wrong else "history"
                assert refused.status_code == 400 and refused.json()["error"]["param"] == param
            form = await client.post("/view/play", content=json.dumps(body), headers={"content-type": "text/plain"})
            assert form.status_code == 415  # what another site's form could send

    run(main())


def test_replay_routes() -> None:
    frames, _ = recorded(seed=3)
    replay = Replay(frames)
    middle = replay.duration_s / 2

    async def main() -> None:
        async with alone(View("busy.frames", replay=replay)) as client:
            assert (await client.get("/view/config")).json()["uses"] == ["playground", "replay"]
            summary = (await client.get("/view/replay")).json()
            assert summary["title"] == "busy.frames" and summary["num_frames"] == len(frames)
            at = (await client.get(f"/view/replay/at?time_s={middle}")).json()
            assert at["kind"] == "snapshot" and at["time_s"] <= middle
            part = (await client.get(f"/view/replay/frames?from_s={middle}&to_s={replay.duration_s}")).json()
            assert [f["frame"] for f in part["frames"]][:1] == [at["frame"] + 1] and part["end_s"] == replay.duration_s
            block = (await client.get(f"/view/blocks/1?time_s={middle}")).json()
            assert block["id"] == 1 and block["name"] is None
            export = await client.get(f"/view/replay/export?from_s={middle}&to_s={replay.duration_s}")
            assert len(export.content.splitlines()) == 1 + len(part["frames"])
            trace = (await client.get("/view/replay/trace?request_id=r0")).json()
            assert {e["tid"] for e in trace["traceEvents"]} == {1}
            many = "&".join(f"x{i}=1" for i in range(20))
            for wrong in ("at?time_s=-1", "at?time_s=nan", "frames?from_s=x", "at?time_s=1e99", f"at?{many}"):
                assert (await client.get(f"/view/replay/{wrong}")).status_code == 400, wrong

    run(main())
