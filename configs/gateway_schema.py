"""Keys of `rollout.gateway`."""

from __future__ import annotations

import string
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from configs.agent_schema import AgentConfig
from core.strict_model import StrictModel

PLACES = ("engine", "port")
"""Names in braces that `url` may hold."""


class GatewayConfig(StrictModel):
    """Keys of `rollout.gateway`: the address at which agents reach the policy, beyond this machine."""

    listen: str = "127.0.0.1"
    """IP address on which each engine takes requests of agents; 0.0.0.0: all of the machine. TLS is the task of a
    proxy: keep loopback if it runs on this machine."""
    port: int = Field(default=0, ge=0, le=64000)
    """Port of the first engine. Engine n listens on port + n. 0: any free port."""
    url: str | None = None
    """Address that agents are given, such as https://policy.example.org/{engine}; {engine} stands for the number of the
    engine, {port} for its port. Unset: http://LISTEN:PORT."""
    insecure: bool = False
    """Allow plain HTTP on an address that other machines may reach. Keys of episodes and all texts can then be read on
    the way."""

    @field_validator("listen")
    @classmethod
    def is_an_address(cls, given: str) -> str:
        try:
            ip_address(given)
        except ValueError as error:
            raise ValueError(f"{given!r:.60} must be an IP address, such as 127.0.0.1 or 0.0.0.0") from error
        return given

    @field_validator("url")
    @classmethod
    def is_a_url(cls, given: str | None) -> str | None:
        if given is None:
            return None
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(given) if name is not None]
            parts = urlsplit(given.format(engine=0, port=1))
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query + parts.fragment
        except (ValueError, KeyError, IndexError):
            names, is_whole = [], False
        if not is_whole or not {*names} <= {*PLACES}:
            raise ValueError(f"{given!r:.100} must be like https://policy.example.org/{{engine}}")
        return given.rstrip("/")

    @model_validator(mode="after")
    def can_be_reached_and_is_no_secret(self) -> GatewayConfig:
        listens = ip_address(self.listen)
        if listens.is_unspecified and self.url is None:
            raise ValueError(f"listen={self.listen} is no address to go to: set url to one that agents reach")
        if self.url is not None and not self.port and "{port}" not in self.url:
            raise ValueError("url names no {port}, so port must be set: agents would not find the engine")
        is_plain = not listens.is_loopback or (
            self.url is not None and self.url.startswith("http:") and not _is_loopback(urlsplit(self.url).hostname)
        )
        if is_plain and not self.insecure:
            raise ValueError(
                f"listen={self.listen} and url={self.url} are plain HTTP on an address that other machines reach, "
                "where keys and texts can be read: listen on 127.0.0.1 behind a proxy with TLS, or set insecure: true"
            )
        if self.insecure and not is_plain:
            raise ValueError("insecure has no effect, for nothing here is plain HTTP to another machine: leave it out")
        return self

    def find_port(self, engine: int) -> int:
        """Return the port of an engine, or 0 for any free one."""
        return self.port and self.port + engine

    def write_url(self, engine: int, port: int) -> str:
        """Return the address of an engine that listens on `port`."""
        host = f"[{self.listen}]" if ":" in self.listen else self.listen
        return (self.url or f"http://{host}:{port}").format(engine=engine, port=port)


def check_gateway(gateway: GatewayConfig | None, agent: AgentConfig | None, *, engines: int) -> None:
    """Raise ValueError unless agents find every engine at the address, which is for agents alone."""
    afar = [one for one in (agent.address if agent else ()) if not _is_loopback(urlsplit(one).hostname)]
    if afar and gateway is None:
        raise ValueError(f"agent.address={afar[0]} is another machine, which does not reach 127.0.0.1: set gateway")
    if gateway is None:
        return
    if not gateway.insecure and (plain := [one for one in afar if one.startswith("http:")]):
        raise ValueError(
            f"agent.address={plain[0]} is plain HTTP to another machine, where keys and texts can be read: use https, "
            "or set gateway.insecure: true"
        )
    if agent is None:
        raise ValueError("gateway is for agents: set agent, or leave gateway out")
    if engines > 1 and gateway.url and "{" not in gateway.url:
        raise ValueError(f"gateway.url={gateway.url} is one address for several engines: add {{engine}} to it")


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False
