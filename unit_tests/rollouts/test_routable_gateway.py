"""The gateway at an address that other machines reach: its keys, a proxy with TLS, and an agent on another host."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from configs.gateway_schema import GatewayConfig
from configs.rollout_schema import RolloutConfig
from core.errors import UserError
from rollouts.agents.gateway import Gateway
from rollouts.agents.task import HOST_KEY
from unit_tests.helpers.other_packages import ROOT
from unit_tests.helpers.runs import metrics_of
from unit_tests.helpers.scripted_policy import Policy, check_exact, make_session
from unit_tests.helpers.two_hosts import ADDRESS, Hosts, needs_two_hosts

REFUSED = [
    ({"listen": "example.org"}, "must be an IP address"),
    ({"listen": "0.0.0.0", "port": 1, "insecure": True}, "is no address to go to: set url"),
    ({"listen": "10.0.0.1"}, "set insecure: true"),
    ({"url": "http://10.0.0.1:5", "port": 5}, "set insecure: true"),
    ({"listen": "::", "url": "https://example.org", "port": 5}, "set insecure: true"),
    ({"insecure": True}, "insecure has no effect"),
    ({"url": "https://example.org"}, "port must be set"),
    ({"url": "https://example.org/{rank}", "port": 5}, "must be like https://policy.example.org/{engine}"),
    ({"url": "example.org", "port": 5}, "must be like https://policy.example.org/{engine}"),
    ({"url": "https://example.org/{engine", "port": 5}, "must be like https://policy.example.org/{engine}"),
]


@pytest.mark.parametrize("keys, words", REFUSED)
def test_an_address_that_is_open_or_leads_nowhere_is_refused(keys, words):
    with pytest.raises(ValidationError) as refusal:
        GatewayConfig(**keys)
    assert words in str(refusal.value)


def test_several_engines_need_addresses_of_their_own():
    agent = {"command": ["true"]}
    one = {"url": "https://example.org", "port": 5}
    with pytest.raises(ValidationError, match="one address for several engines: add"):
        RolloutConfig(agent=agent, gateway=one, num_engines=2)
    with pytest.raises(ValidationError, match="gateway is for agents"):
        RolloutConfig(gateway=one)
    config = GatewayConfig(url="https://example.org/e{engine}/", port=18600)
    assert [(config.find_port(n), config.write_url(n, 1)) for n in (0, 3)] == [
        (18600, "https://example.org/e0"),
        (18603, "https://example.org/e3"),
    ]


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_engines_listen_where_the_recipe_says(qwen, capsys):
    port = find_port()
    config = GatewayConfig(listen="127.0.0.2", port=port - 1, url="http://localhost:{port}/x")

    async def run() -> None:
        gateway, session = Gateway(config, engine=1), make_session(Policy(qwen, []))
        async with gateway.serving(session) as url:
            assert url == f"http://localhost:{port}/x/s/{session.id}/v1"
            async with httpx.AsyncClient(headers={"x-api-key": session.key}) as client:
                found = await client.get(f"http://127.0.0.2:{port}/s/{session.id}/v1/models")
            assert found.status_code == 200
            with pytest.raises(UserError, match=f"engine 1 cannot listen on 127.0.0.2, port {port} .*: free it"):
                async with Gateway(config, engine=1).serving(session):
                    pass
        await gateway.close()

    asyncio.run(run())
    assert f"agents reach engine 1 at http://localhost:{port}/x (port {port})" in capsys.readouterr().err


NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
SERVER = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} ssl;
        ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
        {location}
    }}
}}
"""


@pytest.mark.verify
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt install nginx-light")
def test_nginx_of_the_page_brings_tls(qwen, tmp_path: Path):
    openai = pytest.importorskip("openai")
    page = (ROOT / "docs" / "how_to" / "agent.md").read_text(encoding="utf-8")
    location = page.partition("<!-- file: engine0.conf -->\n```text\n")[2].partition("```")[0]
    own, outer = find_port(), find_port()
    (tmp_path / "nginx.conf").write_text(
        SERVER.format(folder=tmp_path, port=outer, location=location.replace("18600", str(own)))
    )
    certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", f"{tmp_path}/key.pem", "-out", f"{tmp_path}/cert.pem"]
    names = ["-addext", "subjectAltName=DNS:localhost", *files]
    subprocess.run([*certificate, *names], check=True, capture_output=True)
    command = [str(NGINX), "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "error.log")]
    policy = Policy(qwen, ["Seven.", "Eight."])

    async def run() -> None:
        config = GatewayConfig(port=own, url=f"https://localhost:{outer}/{{engine}}")
        gateway, session = Gateway(config), make_session(policy)
        trusted = ssl.create_default_context(cafile=f"{tmp_path}/cert.pem")
        async with gateway.serving(session) as url, httpx.AsyncClient(verify=trusted, trust_env=False) as http:
            assert url == f"https://localhost:{outer}/0/s/{session.id}/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key=session.key, http_client=http, max_retries=30)
            said = [{"role": "user", "content": "Which?"}]
            # retried until nginx is up
            first = await client.chat.completions.create(model="policy", messages=said)
            said += [first.choices[0].message, {"role": "user", "content": "More?"}]
            stream = await client.chat.completions.create(model="policy", messages=said, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Eight."
        await gateway.close()
        [branch] = session.trace.list_branches()
        check_exact([branch], policy.log)

    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        asyncio.run(run())
    finally:
        server.terminate()
        server.wait()


def train_on_two_hosts(recipe, tmp_path: Path, agent: Callable[[Hosts], dict[str, Any]]) -> str:
    """Train two steps with driver and engine on nodea. Return the output. agent: makes `rollout.agent`."""
    (tmp_path / "agent.py").write_text(ON_NODE_B)
    hosts = Hosts(tmp_path)
    try:
        hosts.connect()
        gateway = {"listen": ADDRESS["nodea"], "port": 18600, "insecure": True}
        changes = {"rollout.agent": agent(hosts), "rollout.gateway": gateway}
        config = recipe(changes | {"reward": {"function": "environment", "weights": {"answered": 1.0}}})
        run = hosts.start_run("main_rl.py", "--config", config)
        code, said = run.wait(timeout=300), (tmp_path / "run.log").read_text()
    finally:
        hosts.close()
    assert code == 0 and f"agents reach engine 0 at http://{ADDRESS['nodea']}:18600" in said, said
    assert "in plain HTTP: keys and texts can be read on the way" in said
    [folder] = (tmp_path / "runs").iterdir()
    steps = metrics_of(folder)
    assert len(steps) == 2 and all(step["reward/answered"] == 1.0 for step in steps), steps[0].keys()
    return said


ON_NODE_B = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
body = json.dumps({"model": "policy", "max_tokens": 9, "messages": task["messages"]}).encode()
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, headers)
reply = json.load(urllib.request.urlopen(request, timeout=60))
os.write(3, json.dumps({"words": float(len(reply["content"])), "answered": 1.0}).encode() + b"\\n")
"""


@needs_two_hosts
@pytest.mark.verify
@pytest.mark.timeout(600)
def test_an_agent_on_another_host_is_trained_on(recipe, tmp_path):
    """The driver and the engine are on nodea; the agent's process is in the network of nodeb."""

    def make(hosts: Hosts) -> dict[str, Any]:
        inside = ["ip", "netns", "exec", hosts.space("nodeb")]
        return {"command": [*inside, sys.executable, str(tmp_path / "agent.py")]}

    train_on_two_hosts(recipe, tmp_path, make)


@needs_two_hosts
@pytest.mark.verify
@pytest.mark.timeout(600)
def test_episodes_on_another_host_are_trained_on(recipe, tmp_path):
    """The driver and the engine are on nodea; nodeb plays the episodes, which it is asked for over HTTP."""

    def make(hosts: Hosts) -> dict[str, Any]:
        hosts.environment[HOST_KEY] = "a key of both"
        host = [sys.executable, "-m", "rollouts.agents.host", "--listen", ADDRESS["nodeb"], "--insecure"]
        agent = [sys.executable, str(tmp_path / "agent.py")]
        hosts.runs.append(hosts.start("nodeb", *host, "--", *agent, log=tmp_path / "host.log"))
        return {"address": [f"http://{ADDRESS['nodeb']}:9000"]}

    train_on_two_hosts(recipe, tmp_path, make)
    assert f"at http://{ADDRESS['nodeb']}:9000" in (tmp_path / "host.log").read_text()
