"""The Kubernetes objects are valid for several releases, restricted, and consistent.

And Prometheus' job for them: it is led to the pods, gets through their policy, and a node with their config answers.
"""

from __future__ import annotations

import copy
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import load_node_config
from p2ptrain.observe.guard import OPEN
from tests.helpers.deploy import DEPLOY, read_documents, read_yaml
from tests.helpers.web import site

OBJECTS = DEPLOY / "kubernetes/p2ptrain.yaml"
TOKEN = b"of-this-test-0123456789"
RELEASES = ("1.31.0", "1.34.0", "1.37.0")
LABELS = {"app.kubernetes.io/name": "p2ptrain"}
KINDS = {"Namespace", "ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}


@pytest.fixture
def objects() -> dict[str, Any]:
    return read_documents(OBJECTS)


@pytest.fixture
def pod(objects: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = objects["StatefulSet"]["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_every_object_is_of_its_schema(objects: dict[str, Any], release: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="takes kubernetes-validate: pip install -e '.[deploy]'")
    assert objects.keys() == KINDS
    for each in objects.values():
        schemas.validate(each, release, strict=True)
    wrong = copy.deepcopy(objects["StatefulSet"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesytem"] = True
    with pytest.raises(schemas.ValidationError, match="readOnlyRootFilesytem"):
        schemas.validate(wrong, release, strict=True)


def test_pods_keep_what_the_restricted_standard_asks(objects: dict[str, Any], pod: dict[str, Any]) -> None:
    """And more: no root filesystem that can be written, and limits."""
    assert objects["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert pod["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": 10_001, "runAsGroup": 10_001, "fsGroup": 10_001,
        "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for each in (*pod["containers"], *pod["initContainers"]):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert each["resources"]["limits"].keys() == each["resources"]["requests"].keys() == {"cpu", "memory"}
    assert {next(iter(each.keys() - {"name"})) for each in pod["volumes"]} <= {"configMap", "secret", "emptyDir"}


def test_everything_selects_the_pods_and_names_that_exist(objects: dict[str, Any], pod: dict[str, Any]) -> None:
    spec = objects["StatefulSet"]["spec"]
    assert spec["serviceName"] == objects["Service"]["metadata"]["name"]
    assert objects["Service"]["spec"]["clusterIP"] == "None"
    assert spec["template"]["metadata"]["labels"] == LABELS == objects["Service"]["spec"]["selector"]
    for selector in (spec["selector"], objects["PodDisruptionBudget"]["spec"]["selector"]):
        assert selector == {"matchLabels": LABELS}
    assert objects["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": LABELS}
    for kind, each in objects.items():
        assert kind == "Namespace" or each["metadata"]["namespace"] == objects["Namespace"]["metadata"]["name"], kind
    volumes = {each["name"] for each in (*pod["volumes"], *(v["metadata"] for v in spec["volumeClaimTemplates"]))}
    mounted = {each["name"] for part in (*pod["containers"], *pod["initContainers"]) for each in part["volumeMounts"]}
    assert mounted == volumes
    (config,) = (each["configMap"] for each in pod["volumes"] if "configMap" in each)
    assert config["name"] == objects["ConfigMap"]["metadata"]["name"]


def test_it_is_asked_where_no_token_is_needed(pod: dict[str, Any]) -> None:
    (node,) = pod["containers"]
    asked = {kind: node[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert asked == {
        "startup": {"path": "/healthz", "port": "http"},
        "liveness": {"path": "/healthz", "port": "http"},
        "readiness": {"path": "/readyz", "port": "http"},
    }
    assert {each["path"] for each in asked.values()} == set(OPEN)


def test_the_nodes_config_is_one_and_its_paths_are_mounted(
    objects: dict[str, Any], pod: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(objects["ConfigMap"]["data"]["node.toml"])
    config = load_node_config(file)
    (node,), (token,) = pod["containers"], pod["initContainers"]
    assert node["args"] == ["join", "--config", "/etc/p2ptrain/node.toml"]
    assert token["command"][-1] == config.http.token_file
    places = {each["mountPath"] for each in node["volumeMounts"]}
    assert {str(Path(config.http.token_file).parent), "/etc/p2ptrain", "/var/lib/p2ptrain", "/tmp"} == places
    assert tomllib.loads(file.read_text())["device"]["threads"] == int(node["resources"]["limits"]["cpu"])
    assert pod["enableServiceLinks"] is False, "P2PTRAIN_SERVICE_HOST and its like are no settings"


def test_a_quorum_is_left_and_nothing_reaches_the_clouds_secrets(objects: dict[str, Any]) -> None:
    replicas, budget = objects["StatefulSet"]["spec"]["replicas"], objects["PodDisruptionBudget"]["spec"]
    assert replicas - budget["maxUnavailable"] >= replicas // 2 + 1
    policy = objects["NetworkPolicy"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    everyone = [rule["ports"] for rule in policy["ingress"] if "from" not in rule]
    assert everyone == [[{"protocol": "TCP", "port": "p2p"}]]
    blocks = [to["ipBlock"] for rule in policy["egress"] for to in rule["to"] if "ipBlock" in to]
    own = ["169.254.169.254", "10.96.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "fd00::1", "fe80::1"]
    for host, is_let_through in [*((each, False) for each in own), ("9.9.9.9", True), ("2620:fe::fe", True)]:
        assert any(_is_in(block, host) for block in blocks) is is_let_through, host
    (swarm,) = (to for rule in policy["egress"] for to in rule["to"] if set(to) == {"podSelector"})
    assert swarm == {"podSelector": policy["podSelector"]}


def _is_in(block: dict[str, Any], host: str) -> bool:
    address = ip_address(host)
    ranges = [ip_network(each) for each in (block["cidr"], *block["except"])]
    return address in ranges[0] and not any(address in each for each in ranges[1:])


# ---------------------------------------------------------------------------------------------------
# Prometheus


@pytest.fixture
def job() -> dict[str, Any]:
    (found,) = read_yaml(DEPLOY / "prometheus/kubernetes.yml")["scrape_configs"]
    assert found["job_name"] == "p2ptrain", "which the alerts and the dashboard ask for"
    return dict(found)


def test_prometheus_is_led_to_the_pods_and_gets_through_to_them(job: dict[str, Any], objects: dict[str, Any]) -> None:
    service = objects["Service"]
    (port,) = (each["port"] for each in service["spec"]["ports"] if each["name"] == "http")
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert job["dns_sd_configs"] == [{"names": [name], "type": "A", "port": port}]
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True), (
        "the name leads to the pods themselves, and to those with complaints too"
    )
    (prometheus,) = (rule for rule in objects["NetworkPolicy"]["spec"]["ingress"] if "from" in rule)
    assert prometheus["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert prometheus["from"] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
    ]


async def test_a_node_with_the_pods_config_answers_prometheus_and_nobody_without_the_token(
    job: dict[str, Any], objects: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(objects["ConfigMap"]["data"]["node.toml"])
    http = load_node_config(file).http
    assert job["authorization"] == {"type": "Bearer", "credentials_file": "/etc/p2ptrain/token"}
    bearer = {"Authorization": f"Bearer {TOKEN.decode()}"}
    async with site(host=http.host, allowed=http.allowed_hosts, token=TOKEN, address="127.0.0.2") as here:
        assert (await here.get("/metrics", headers=bearer))[0] == 200, "by its address"
        assert (await here.get("/metrics"))[0] == 401
        name = f"p2ptrain-0.p2ptrain.p2ptrain.svc:{here.port}"
        assert (await here.get("/metrics", headers={**bearer, "Host": name}))[0] == 421
