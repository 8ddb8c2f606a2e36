"""Simulate requests on a GPU that you do not have, and print the latencies.

The engine's own scheduler decides; a cost model says how long each step would take. No model is loaded.

Start it with: python examples/simulate_trace.py --gpu h200
"""

import argparse

from octavo import EngineArgs
from octavo.simulate import report, traces
from octavo.simulate.devices import find_device
from octavo.simulate.models import find_model
from octavo.simulate.simulation import SimConfig, simulate

parser = argparse.ArgumentParser(description="Simulate requests on a GPU that you do not have.")
parser.add_argument("--model", default="llama-3.1-8b", help="a name of `octavo models`, or a directory with a config")
parser.add_argument("--gpu", default="l4", help="h200, h100, a100-80, a100-40, l4, or cpu")
parser.add_argument("--requests", type=int, default=300, help="how many of them")
args = parser.parse_args()

model, device = find_model(args.model), find_device(args.gpu)
print(f"{model.name} on one {device.name}, {args.requests} requests with ShareGPT's lengths")
for rate in (1, 4, 16):
    config = SimConfig(model, device, EngineArgs(model=model.name))
    arrivals = traces.from_lengths(traces.sharegpt_like(args.requests), traces.poisson(rate))
    records = simulate(config, arrivals)
    first, token = report.ttft(records), report.tpot(records)
    print(
        f"{rate:3} requests/s: first token {first.mean() * 1e3:6.0f} ms, then {token.mean() * 1e3:5.1f} ms a token, "
        f"{len(records)} finished, {sum(records.num_preempted.values())} preemptions"
    )
