"""The server's routes against their own description, and what is refused how; no model needed."""

from __future__ import annotations

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from made_up_server import KEY, Client, Worker, app, call
from schemathesis.specs.openapi.checks import allow_header_conformance, positive_data_acceptance

from paceline.engines.serving.control import MAX_BODY, PATH, RECORD_PATH
from paceline.policy import CapacityPolicy

# which texts are policies is more than a schema says; and with one route a method, as FastAPI has
# it, Starlette's 405 names the first one's
BEYOND = [positive_data_acceptance, allow_header_conformance]
schema = schemathesis.openapi.from_asgi("/openapi.json", app(Client()))


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case: schemathesis.Case) -> None:
    """No 5xx, only statuses and bodies that /openapi.json names: right requests and wrong ones."""
    case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=BEYOND)


def test_the_description_has_types() -> None:
    _, told = call(app(Client()), "GET", "/openapi.json")
    assert {(path, method) for path, methods in told["paths"].items() for method in methods} == {
        (PATH, "get"), (PATH, "post"), (PATH, "delete"), (RECORD_PATH, "get"),
        (RECORD_PATH, "delete"),
    }  # fmt: skip
    state = told["components"]["schemas"]["WorkerState"]["properties"]
    assert state["dropped"]["type"] == "integer"
    assert {"HTTPBearer": []} in told["paths"][PATH]["post"]["security"]


def test_the_description_names_all_that_a_worker_says() -> None:
    """A field that the forms don't know would be lost on the way."""
    client = Client()
    _, found = call(app(client), "GET", PATH)
    assert found["workers"] == [worker.paceline_describe() for worker in client.workers]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b"null", b'{"policy": 1}', b'{"policy": " "}', b'{"policy": null}',
        b'{"policy": ["a"]}', b'{"policy": "mode=observe", "b": 1}', b"[" * 60_000,
        b'{"rung": 1}', b'{"rung": "1", "policy": "start"}', b'{"rung": "1", "keep_cache": 1}',
        b'{"policy":' * 6000, b"\xff", b'{"policy": "capacity_factor=0"}', b'{"policy": "\\ud800"}',
        b'{"policy": "seed=' + b"9" * 5000 + b'"}', b'{"policy": "capacity_factor=NaN"}',
    ],
)  # fmt: skip
def test_a_bad_body_is_one_sentence_and_changes_nothing(body: bytes) -> None:
    client = Client()
    served = app(client)
    status, answer = call(served, "POST", PATH, body)
    assert (status, list(answer)) == (400, ["error"])
    assert "\n" not in answer["error"]
    assert len(answer["error"]) < 600
    assert [worker.policy for worker in client.workers] == [client.workers[0].start] * 2
    assert client.emptied == 0


@pytest.mark.parametrize("kind", [b"text/plain", b"application/x-www-form-urlencoded", b""])
def test_only_json_is_a_body(kind: bytes) -> None:
    """A page in a browser can't send JSON elsewhere without being asked first."""
    body = b'{"policy": "mode=observe"}'
    status, answer = call(app(Client()), "POST", PATH, body, kind=kind)
    assert (status, list(answer)) == (400, ["error"])


@pytest.mark.parametrize("pieces", [1, 100])
def test_a_long_body_is_not_kept(pieces: int) -> None:
    body = json.dumps({"policy": "mode=observe", "pad": "x" * MAX_BODY}).encode()
    assert call(app(Client()), "POST", PATH, body, pieces=pieces)[0] == 413


@pytest.mark.parametrize("path", [PATH, RECORD_PATH])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("key", [None, "", "wrong", KEY + "x", "ключ"])
def test_without_the_key_nothing_is_said_or_done(path: str, method: str, key: str | None) -> None:
    client = Client()
    status, answer = call(app(client), method, path, b'{"policy": "mode=observe"}', key=key)
    assert status == (405 if (path, method) == (RECORD_PATH, "POST") else 401)
    assert "policy" not in json.dumps(answer)
    assert client.workers[0].recording
    assert client.workers[0].policy == client.workers[0].start


def test_the_key_is_asked_for_before_a_body_is_read() -> None:
    assert call(app(Client()), "POST", PATH, b"x" * (MAX_BODY + 1), key="wrong")[0] == 401


class Stubborn(Worker):
    """A worker that follows nothing."""

    def paceline_set(self, text: str | None) -> None:
        """Keep what is in force."""


class Full(Worker):
    """A worker that could not finish its trace."""

    def paceline_stop_recording(self) -> dict[str, object]:
        """As the recorder says it."""
        return {"folder": "trace", "recording": False, "forwards": 1, "error": "disk full"}


def test_what_workers_do_is_seen() -> None:
    body = b'{"policy": "capacity_factor=2"}'
    client = Client()
    client.workers[1] = Stubborn(1)
    assert call(app(client), "POST", PATH, body)[0] == 500
    assert not call(app(client), "GET", PATH)[1]["agree"]
    assert call(app(Client(1)), "POST", PATH, body)[0] == 501
    assert call(app(None), "GET", PATH)[0] == 503
    client.workers[0] = Full(0)
    assert call(app(client), "DELETE", RECORD_PATH)[0] == 500
    client.workers = client.workers[1:] * 2
    assert call(app(client), "GET", RECORD_PATH)[0] == 404


def test_a_policy_is_followed_by_all() -> None:
    client = Client()
    served = app(client)
    status, answer = call(served, "POST", PATH, b'{"policy": " gamma=0.5,unit=expert "}')
    assert status == 200
    assert answer["agree"]
    wanted = CapacityPolicy(gamma=0.5, unit="expert")
    assert [worker.policy for worker in client.workers] == [wanted, wanted]
    assert client.emptied == 1
    assert call(served, "DELETE", PATH)[1]["off"]
    assert call(served, "POST", PATH, b'{"policy": "start"}')[1]["policy"] == "capacity_factor=1.25"
    emptied = client.emptied
    for body, more in ((b'{"rung": "0.75"}', 1), (b'{"rung": "0.75", "keep_cache": true}', 0)):
        status, answer = call(served, "POST", PATH, body)
        assert (status, answer["policy"]) == (200, "capacity_factor=0.75")
        emptied += more
        assert client.emptied == emptied
    assert call(served, "POST", PATH, b'{"rung": "2"}') == (400, {"error": "rung must be 0.75."})
