"""Devices by their published peaks, or by a JSON file; the shares of the peaks that this engine reaches."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ParameterError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """Published peaks of a device, and the shares of them that are reached.

    memory_bytes                    memory of one device, as its driver reports it
    bandwidth, flops                peak bytes and dense 16-bit operations per second
    host_link, peer_link            bytes per second to the host (one way, reached), and to other devices of the host
    source                          of the step times: "measured" on such a device, or from "published" peaks
    is_supported                    this engine runs on it
    price                           per hour; 0: unknown
    bandwidth_share, flops_share    shares reached by kernels: for weights and KV, and for matrix products
    activation_passes               times that a layer reads or writes a token's hidden state, or as much
    peer_s                          latency of an all-reduce before its first byte
    layer_s                         overhead of a layer in a forward pass
    chunk_s                         overhead of a step with prefill chunks, which run in a pass of their own
    slice_s                         time per sequence of a pass: sampling, and the host's work on its token
    host_s                          see `CostModel`
    move_s                          latency of each block moved to or from the host, before its first byte
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: float
    host_link: float
    peer_link: float
    source: str = "published"
    is_supported: bool = True
    price: float = 0.0
    bandwidth_share: float = 0.855
    flops_share: float = 0.73
    activation_passes: float = 40.0
    peer_s: float = 10e-6
    layer_s: float = 20e-6
    chunk_s: float = 1.4e-3
    slice_s: float = 1.8e-6
    host_s: float = 0.2e-3
    move_s: float = 5e-6


def _published(
    name: str, memory_gib: float, bandwidth_gb_s: float, tflops: float, host_link: float, peer_link: float, **more: Any
) -> Device:
    return Device(name, memory_gib * GIB, bandwidth_gb_s * 1e9, tflops * 1e12, host_link * 1e9, peer_link * 1e9, **more)


DEVICES = {
    device.name: device
    for device in (
        _published("h200", 139.8, 4800, 989, 50, 450, source="measured"),
        _published("h100", 79.1, 3350, 989, 50, 450),
        _published("a100-80", 79.1, 2039, 312, 22, 300),
        _published("a100-40", 39.4, 1555, 312, 22, 300),
        _published("l4", 22.0, 300, 121, 22, 22),
        _published("l40s", 44.4, 864, 362, 22, 22),
        _published("a10g", 22.0, 600, 70, 22, 22),
        _published("rtx4090", 23.5, 1008, 165.2, 22, 22),
        _published("rtx5090", 31.3, 1792, 209.5, 50, 50),
        _published("b200", 178.3, 8000, 2250, 50, 900),
        _published("mi300x", 191.5, 5300, 1307.4, 50, 448, is_supported=False),
    )
}
"""Peaks from the vendors' data sheets, dense, 16-bit with sums in float32 (a10g's, rtx5090's and mi300x's
operations from memory, not checked); `peer_link` is one way. Memory is what the
driver reports. The shares are fitted to an H200 (docs/simulator.md), and assumed for the others."""

FILE_FIELDS = {
    "name": "",
    "memory_gib": "memory_bytes",
    "bandwidth_gb_s": "bandwidth",
    "tflops": "flops",
    "host_link_gb_s": "host_link",
    "peer_link_gb_s": "peer_link",
    "price_per_hour": "price",
    "bandwidth_share": "bandwidth_share",
    "flops_share": "flops_share",
}
"""Fields of a device file, and the attributes of a `Device`. The first four are required."""
REQUIRED = tuple(FILE_FIELDS)[:4]
SCALES = {"memory_gib": GIB, "bandwidth_gb_s": 1e9, "tflops": 1e12, "host_link_gb_s": 1e9, "peer_link_gb_s": 1e9}


def find_device(name: str) -> Device:
    """A device of `DEVICES` by name, "cpu", this machine, or one described by a .json file. Raises `ParameterError`."""
    if name.endswith(".json"):
        return read_device(Path(name).expanduser())
    if name.lower() == "cpu":
        return this_cpu()
    device = DEVICES.get(name.lower())
    if device is None:
        near = difflib.get_close_matches(name.lower(), [*DEVICES, "cpu"], n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(DEVICES)}, cpu, or a .json file"
        raise ParameterError(f"no device {name!r}; {hint}", param="device")
    return device


def name_of(driver_name: str, memory_bytes: float) -> str:
    """The name in `DEVICES` of a GPU, given its driver's name and memory; `driver_name` if there is none."""
    words = driver_name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    for device in DEVICES.values():
        if device.name.split("-")[0] in words and abs(device.memory_bytes / memory_bytes - 1) < 0.1:
            return device.name
    return driver_name


def read_device(path: Path) -> Device:
    """Read a device file. Raises `ParameterError` for a missing, unknown or invalid field."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"cannot read {path}: {error.strerror}", param="device") from None
    except (ValueError, RecursionError):
        fields = None
    expected = f"expected a JSON object with {', '.join(REQUIRED)}, and optionally {', '.join([*FILE_FIELDS][4:])}"
    if not isinstance(fields, dict):
        raise ParameterError(f"{path} is not a device; {expected}", param="device")
    if unknown := sorted(set(fields) - set(FILE_FIELDS)):
        raise ParameterError(f"{path}: unknown field {unknown[0]!r}; {expected}", param="device")
    if missing := [name for name in REQUIRED if name not in fields]:
        raise ParameterError(f"{path}: no field {missing[0]!r}; {expected}", param="device")
    name = fields.pop("name")
    if not isinstance(name, str) or not name.strip() or name.lower() in (*DEVICES, "cpu"):
        raise ParameterError(f"{path}: name is {name!r}; choose one that is not built in", param="device")
    for key, value in fields.items():
        limit = 1.0 if key.endswith("_share") else 1e9
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
            raise ParameterError(
                f"{path}: {key} is {value!r}; expected a number above 0, up to {limit:g}", param="device"
            )
    values = {FILE_FIELDS[key]: value * SCALES.get(key, 1) for key, value in fields.items()}
    return Device(**{"name": name, "host_link": 22e9, "peer_link": 22e9, "source": str(path), **values})


def this_cpu() -> Device:
    """This machine, estimated with a copy and a matrix product in half a second. `octavo calibrate` is more
    accurate."""
    import os
    import time

    import numpy as np

    source = np.ones(1 << 24, dtype=np.float32)
    matrix = np.ones((1024, 1024), dtype=np.float32)
    copy_s, product_s = math.inf, math.inf
    for _ in range(5):
        begin = time.perf_counter()
        source.copy()
        middle = time.perf_counter()
        matrix @ matrix
        copy_s, product_s = min(copy_s, middle - begin), min(product_s, time.perf_counter() - middle)
    bandwidth, flops = 2 * source.nbytes / copy_s, 2 * 1024**3 / product_s
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    links = bandwidth / 2, bandwidth / 2
    return Device(
        "cpu", memory, bandwidth, flops, *links, "measured", True, 0.0, 0.6, 0.6, layer_s=3e-5, chunk_s=0, slice_s=5e-5
    )
