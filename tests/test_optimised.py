"""Under `python -O`, which drops asserts, everything is decided and refused as it is without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.policy import REGISTERED

PROGRAM = """
import json, sys
import numpy as np, torch
from paceline import CapacityPolicy, ExpertPlacement, RoutingInputs, register_keep, route
from paceline.routing.backends import using_backend
from paceline.routing.stats import LoadAccumulator

said = {"optimised": not __debug__}
def call(tokens=40, **changes):
    scores = torch.from_numpy(np.random.default_rng(0).random((tokens, 8), dtype=np.float32))
    weights, ids = scores.topk(2, dim=1)
    label = torch.arange(tokens) % 4
    return RoutingInputs(**{**dict(topk_ids=ids, topk_weights=weights, scores=scores,
        valid=label + torch.arange(tokens) > 3, token_source=label, token_request=label,
        token_priority=label - 2, token_decode=label == 1), **changes})

placement = ExpertPlacement.contiguous(8, 4)
loads = LoadAccumulator("x", placement, 2, "cpu")
for text in sys.argv[1].split():
    policy = CapacityPolicy.parse(text)
    said[text] = [vars(policy).get(name) is not None for name in ("factor", "json_form")]
    for backend in (None, "plain"):
        with using_backend(backend):
            a = route(call(), policy, placement)
        loads.add(a)
        said[text] += [a.topk_ids.tolist(), a.topk_weights.tolist(), a.capacity.tolist(),
                       int(a.dropped), int(a.extras), float(a.gate_mass_kept)]
loads.observe(call().topk_ids)
said["stats"] = loads.result().to_dict()

cap = CapacityPolicy(capacity_factor=1, min_expert_load=0)
register_keep("odd", lambda inputs: 3)
BAD = {
    "policy": lambda: CapacityPolicy(capacity_factor=-1),
    "expand": lambda: CapacityPolicy(capacity_factor=1, max_experts=3),
    "array": lambda: CapacityPolicy(capacity_factor=np.ones(3)),
    "placement": lambda: ExpertPlacement.explicit([0, True]),
    "ids": lambda: call(topk_ids=np.zeros((40, 2))),
    "shape": lambda: call(topk_weights=torch.ones(40, 3)),
    "scores": lambda: route(call(scores=None, num_experts=8), cap, placement),
    "one device": lambda: route(call(), cap, ExpertPlacement.contiguous(8, 1)),
    "k": lambda: route(call(), cap.replace(expand="all", max_experts=1), placement),
    "expand scores": lambda: route(call(scores=None), cap.replace(keep="weight", expand="all"),
                                   placement),
    "source": lambda: route(call(token_source=torch.full((40,), 9)), cap.replace(pool="source"),
                            placement),
    "ranking": lambda: route(call(), cap.replace(keep="odd"), placement),
}
for name, refused in BAD.items():
    try:
        refused()
        said[name] = "taken"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
POLICIES = [
    "gamma=0.75,min_expert_load=0",
    "gamma=0.8,min_expert_load=0,unit=expert,keep=weight,renormalize=true",
    "gamma=0.5,min_expert_load=2,pool=request,phase=prefill,keep=random",
    "gamma=1.1,min_expert_load=0,expand=own_device,max_experts=3",
    "gamma=0.6,min_expert_load=0,pool=source,expand=all,expand_rule=compete,max_experts=2",
    "gamma=1,min_expert_load=0,mode=shadow",
]


def test_nothing_depends_on_asserts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program's output in this process, and in one under -O."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", PROGRAM, " ".join(POLICIES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    monkeypatch.setattr(sys, "argv", ["program", " ".join(POLICIES)])
    monkeypatch.setitem(REGISTERED, "odd", lambda inputs: 3)  # not there for the tests after this
    exec(compile(PROGRAM, "program", "exec"), {})
    usual, optimised = json.loads(capsys.readouterr().out), json.loads(done.stdout)
    assert (usual.pop("optimised"), optimised.pop("optimised")) == (False, True)
    assert usual == optimised
    for name, said in usual.items():
        if isinstance(said, str):
            assert said.startswith(("ValueError: ", "PolicyError: ")), (name, said)
        elif name != "stats":
            assert said[:2] == [True, True], "derived once, when a policy is made"


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
try:
    from paceline import attach
except ImportError as error:
    print(error)
from paceline import CapacityPolicy, route
"""


def test_attach_without_transformers_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert "pip install 'paceline[transformers]'" in done.stdout
    assert done.stdout.count("\n") == 1
