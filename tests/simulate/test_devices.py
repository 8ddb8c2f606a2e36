"""Devices: built in, and described by a file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from octavo.cli.main import run
from octavo.errors import ParameterError
from octavo.simulate.devices import DEVICES, FILE_FIELDS, find_device

FIELDS = {"name": "card", "memory_gib": 44.4, "bandwidth_gb_s": 864, "tflops": 362}
ROOT = Path(__file__).parents[2]


def written(directory: Path, **changes: object) -> str:
    path = directory / "card.json"
    path.write_text(json.dumps({name: value for name, value in (FIELDS | changes).items() if value is not None}))
    return str(path)


def test_file_of_a_built_in_device_gives_the_same_peaks(tmp_path: Path) -> None:
    device, known = find_device(written(tmp_path)), DEVICES["l40s"]
    assert (device.name, device.memory_bytes) == ("card", known.memory_bytes)
    assert (device.bandwidth, device.flops, device.host_link) == (known.bandwidth, known.flops, known.host_link)
    assert device.source.endswith("card.json") and device.price == 0
    assert find_device(written(tmp_path, price_per_hour=2, host_link_gb_s=50)).host_link == 50e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwith_gb_s": 1}, "unknown field 'bandwith_gb_s'; expected a JSON object with name, memory_gib, "),
        ({"tflops": None}, "no field 'tflops'; expected"),
        ({"tflops": "362"}, "tflops is '362'; expected a number above 0"),
        ({"memory_gib": True}, "memory_gib is True"),
        ({"price_per_hour": math.nan}, "price_per_hour is nan"),
        ({"flops_share": 1.5}, "flops_share is 1.5; expected a number above 0, up to 1"),
        ({"name": "H200"}, "name is 'H200'; choose one that is not built in"),
    ],
)
def test_invalid_field_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError) as raised:
        find_device(written(tmp_path, **changes))
    assert message in str(raised.value)


def test_file_that_is_no_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    for name, message in (("list.json", "is not a device; expected"), ("none.json", "cannot read")):
        with pytest.raises(ParameterError, match=message):
            find_device(str(tmp_path / name))


def test_only_the_h200_is_measured_and_only_one_device_is_hypothetical() -> None:
    assert {d.name for d in DEVICES.values() if d.source == "measured"} == {"h200"}
    assert {d.name for d in DEVICES.values() if not d.is_supported} == {"mi300x"}
    assert not any(d.price for d in DEVICES.values()), "prices are the user's"


def test_documented_devices_and_fields_are_those_of_the_code() -> None:
    """The table of docs/simulator.md has each built-in device with its peaks, and each field of a file."""
    text = (ROOT / "docs" / "simulator.md").read_text()
    for device in DEVICES.values():
        peaks = f"{device.bandwidth / 1e9:,.0f} | {device.flops / 1e12:,.6g}"
        assert f"| `{device.name}` | {device.memory_bytes / (1 << 30):g} | {peaks} | {device.source} |" in text
    for name in FILE_FIELDS:
        assert f"`{name}`" in text


def test_a_file_works_in_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, price_per_hour=1.5)
    assert run(["simulate", "--requests", "10", "--gpu", path]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-3.1-8b on 1 x card, ") and f"{path}, not measured" in text
    assert run(["doctor", "llama-3.1-8b", "--gpu", path]) == 0
    assert "44.40 GiB" in capsys.readouterr().out
    line = ["plan", "--trace", "sharegpt", "--requests", "20", "--slo", "ttft=2s", "--gpu", path]
    assert run([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["price"] == 1.5
    assert run([*line, "--gpu", "h200"]) == 2
    assert "no price of h200, but one of card; add it" in capsys.readouterr().err
