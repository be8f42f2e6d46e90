"""Nobody is let in: what a web page, or anybody else on this machine, can send to our servers is refused."""

import json
import signal
import stat
import urllib.error
import urllib.request

import pytest
from prefect.client.orchestration import get_client
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from flows.server import AUTH, auth_string, client_settings, free_port
from tests.projects import ROOT, wait_until

FOREIGN = {"Origin": "https://evil.example"}
COMMAND = {"job_variables": {"command": "touch /tmp/owned"}, "parameters": {}}


def send(url, method="POST", body=None, **headers):
    """Status and headers of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers


@pytest.fixture
def deployment(prefect_server):
    """A deployment on the session's server, whose settings are those of every server of ours."""
    with get_client(sync_client=True) as client:
        flow = client.create_flow_from_name("attacked")
        made = client.create_deployment(flow, "attacked", work_pool_name=None, entrypoint="x.py:x")
        yield made
        client.delete_deployment(made)


def runs_of(deployment):
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/flow_runs/count", json={"deployments": {"id": {"any_": [str(deployment)]}}})
        return answer.json()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        FOREIGN,
        {"Origin": "null"},
        {"Host": "evil.example"},  # a name that was made to point here
        {"Authorization": "Basic OnByZWZlY3Q="},
        {"Authorization": "Bearer x"},
    ],
)
def test_nobody_starts_a_command_without_the_string(prefect_server, deployment, headers):
    status, answered = send(f"{prefect_server}/deployments/{deployment}/create_flow_run", body=COMMAND, **headers)
    assert status == 401
    assert answered.get("access-control-allow-origin") != "*"
    assert runs_of(deployment) == 0


def test_a_browser_is_told_that_other_pages_may_not_call(prefect_server, deployment):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    url = f"{prefect_server}/deployments/{deployment}/create_flow_run"
    status, answered = send(url, "OPTIONS", **FOREIGN, **asked)
    assert status == 400
    assert "access-control-allow-origin" not in answered
    own = prefect_server.removesuffix("/api")
    status, answered = send(url, "OPTIONS", Origin=own, **asked)
    assert (status, answered["access-control-allow-origin"]) == (200, own)


@pytest.mark.parametrize("path", ["/flow_runs/filter", "/work_pools/", "/deployments/filter", "/variables/"])
def test_nothing_else_is_answered_either(prefect_server, path):
    assert send(f"{prefect_server}{path}", body={"name": "x", "type": "process", "value": "x"}, **FOREIGN)[0] == 401


def test_a_web_socket_of_another_page_is_closed(prefect_server):
    """Browsers let every page open one."""
    url = prefect_server.replace("http", "ws", 1)
    for protocols in (None, ["prefect"]):
        with pytest.raises((WebSocketException, OSError)):
            listen(f"{url}/events/in", protocols)


def listen(url, protocols):
    with connect(url, origin="https://evil.example", subprotocols=protocols) as socket:
        socket.send(json.dumps({"type": "auth", "token": "wrong"}))
        while True:
            socket.recv(timeout=60)


def test_who_knows_the_string_may_start_a_run(prefect_server, deployment):
    with get_client(sync_client=True) as client:
        made = client.create_flow_run_from_deployment(deployment)
        assert runs_of(deployment) == 1
        client.delete_flow_run(made.id)


def test_the_string_is_its_owners_alone_and_no_other_servers(tmp_path, monkeypatch):
    path = tmp_path / "work" / "prefect.auth"
    string = auth_string(path)
    assert auth_string(path) == string
    assert len(string) > 30
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert AUTH.is_relative_to(ROOT / "data" / ".work")  # which Git ignores
    assert "PREFECT_API_AUTH_STRING" not in client_settings("https://api.prefect.cloud/api/x")


def test_the_pages_answer_no_other_page_and_say_how_to_call_them(new_project, tmp_path):
    """What `make ui` starts."""
    project = new_project.copy(tmp_path / "project")
    ports = [free_port(), free_port()]
    named = ("--mlflow", str(ports[0]), "--prefect", str(ports[1]))
    pages = project.start("flows.ui", *named, PREFECT_API_URL="", PREFECT_API_AUTH_STRING="")
    try:
        said = "".join(iter(pages.stdout.readline, "Ctrl-C ends both.\n"))
        auth = project.data / ".work" / "prefect.auth"
        assert f"export PREFECT_API_URL=http://127.0.0.1:{ports[1]}/api\n" in said
        assert f'export PREFECT_API_AUTH_STRING="$(cat {auth})"\n' in said
        mlflow, prefect = (f"http://127.0.0.1:{port}" for port in ports)
        for url, part in ((mlflow, "MLflow"), (prefect, "Prefect")):
            with urllib.request.urlopen(f"{url}/", timeout=60) as page:
                assert part in page.read().decode()
        assert send(f"{prefect}/api/flow_runs/filter", body={}, **FOREIGN)[0] == 401
        new = f"{mlflow}/api/2.0/mlflow/experiments/create"
        assert send(new, body={"name": "x"}, **FOREIGN)[0] == 403
        assert send(new, body={"name": "x"}, Host="evil.example")[0] == 403
        _, answered = send(f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=1", "GET", **FOREIGN)
        assert "access-control-allow-origin" not in answered  # a page may ask, and is not shown the answer
        assert send(new, body={"name": "x"})[0] == 200
        called = project.run(
            "prefect",
            "work-pool",
            "ls",
            PREFECT_API_URL=f"{prefect}/api",
            PREFECT_API_AUTH_STRING=auth.read_text().strip(),
        )
        assert called.returncode == 0, called.stderr
        again = project.python("flows.ui", *named)
        assert again.returncode == 2
        assert again.stderr == f"ui: port {ports[0]} is taken; is `make ui` running already? (--mlflow names another)\n"
    finally:
        pages.send_signal(signal.SIGTERM)
        pages.communicate()
    assert wait_until(lambda: not project.processes()), project.processes()
