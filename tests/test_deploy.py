"""What ships in `deploy/`: linters find nothing, commands are understood, every metric exists.

Nothing is started here. The linters: yamllint, check-jsonschema with the Compose specification's
schema, kubernetes-validate with Kubernetes' own; of KubeRay's resource the pods in it are checked.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from carpool.cli.main import cli
from carpool.config import ServeSettings
from carpool.telemetry.metric_list import METRICS

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "carpool.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = [one["expr"] for panel in DASHBOARD["panels"] for one in panel["targets"]]
QUERIES += [rule["expr"] for rule in RULES]


def lint(tool: str, *arguments: str | Path) -> str:
    """What a linter says; nothing where it finds nothing."""
    path = Path(sys.executable).with_name(tool)
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def pods() -> Iterator[dict[str, Any]]:
    """The pods of KubeRay's resource, as Kubernetes would see them."""
    [cluster] = [one for one in KUBERNETES if one["kind"] == "RayCluster"]
    templates = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for template in (one["template"] for one in templates):
        metadata = {"name": "pod", **template.get("metadata", {})}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def kubernetes(folder: Path, *manifests: dict[str, Any]) -> str:
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    return lint("kubernetes-validate", "--strict", file)


def parsed(words: list[str]) -> ServeSettings:
    """The settings of `carpool serve ...`, as the command line takes them."""
    assert words[0] == "serve"
    params = cli.commands["serve"].make_context("serve", words[1:]).params
    known = ServeSettings.__dataclass_fields__
    return ServeSettings(**{name: params[name] for name in known if params.get(name) is not None})


def test_the_yaml_is_tidy() -> None:
    assert lint("yamllint", "--strict", "--config-file", DEPLOY / ".yamllint.yaml", DEPLOY) == ""


def test_compose_understands_its_file_and_not_another(tmp_path: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("image:", "imagine:", 1))

    assert lint("check-jsonschema", *schema, DEPLOY / "compose.yaml") == ""
    assert "imagine" in lint("check-jsonschema", *schema, wrong)


def test_what_compose_mounts_is_there_and_what_it_names_is_declared() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            there = (DEPLOY / source).exists() if source[0] == "." else source in COMPOSE["volumes"]
            assert there, source
        for config in service.get("configs", []):
            assert config["source"] in COMPOSE["configs"]
        for other in service.get("depends_on", []):
            assert other in COMPOSE["services"]


def test_compose_starts_several_workers_and_asks_for_a_key_that_it_does_not_know() -> None:
    front = COMPOSE["services"]["carpool"]
    words = [re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", word) for word in front["command"]]

    settings = parsed(words)

    assert (settings.workers, settings.host) == (2, "0.0.0.0")
    assert front["environment"]["CARPOOL_API_KEY"].startswith("${CARPOOL_API_KEY:?")
    [scraped] = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    assert scraped["authorization"]["credentials"] == "${CARPOOL_API_KEY}"
    assert scraped["static_configs"] == [{"targets": ["carpool:8000"]}]


def test_kubernetes_understands_the_manifests_and_not_others(tmp_path: Path) -> None:
    plain = [one for one in KUBERNETES if one["kind"] != "RayCluster"]
    [first, *_] = pods()

    assert kubernetes(tmp_path, *plain, *pods()) == ""
    first["spec"]["containers"][0]["resource"] = {}
    assert "resource" in kubernetes(tmp_path, first)


PLAIN: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_kubernetes_understands_the_plain_manifest_and_its_command_is_one(tmp_path: Path) -> None:
    deployment = next(one for one in PLAIN if one["kind"] == "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]

    settings = parsed(container["args"])

    assert kubernetes(tmp_path, *PLAIN) == ""
    assert settings.has_keys
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert {one["kind"] for one in PLAIN} >= {"Service", "HorizontalPodAutoscaler"}
    scaler = next(one for one in PLAIN if one["kind"] == "HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] in METRICS


def test_the_chart_with_its_values_is_the_plain_manifest() -> None:
    """Its templates hold values only, so that they are rendered here without Helm."""
    chart = DEPLOY / "helm" / "carpool"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    template = (chart / "templates" / "carpool.yaml").read_text()

    rendered = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda at: str(values[at[1]]), template)

    assert "{{" not in rendered
    assert list(yaml.safe_load_all(rendered)) == PLAIN
    assert set(re.findall(r"\.Values\.(\w+)", template)) == values.keys()


def test_every_alert_says_what_to_do() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_kuberay_runs_a_front_on_a_head_without_workers_and_has_pods_for_all_of_them() -> None:
    [cluster] = [one["spec"] for one in KUBERNETES if one["kind"] == "RayCluster"]
    [head, *workers] = pods()
    [container] = head["spec"]["containers"]
    script = container["args"][0].replace("\\\n", " ")
    [line] = [line for line in script.splitlines() if "carpool serve" in line]

    settings = parsed(shlex.split(line)[2:])

    assert settings.ray == "auto"
    assert settings.has_keys
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert settings.max_workers == sum(one["maxReplicas"] for one in cluster["workerGroupSpecs"])
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["authOptions"] == {"mode": "token"}
    for worker in workers:
        [one] = worker["spec"]["containers"]
        assert one["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert one["image"] == container["image"]
    ports = {one["containerPort"] for one in container["ports"]}
    assert {container["readinessProbe"]["httpGet"]["port"], settings.port} <= ports


@pytest.mark.parametrize("query", QUERIES)
def test_every_metric_and_label_of_the_dashboard_exists(query: str) -> None:
    names = re.findall(r"carpool_\w+", query)
    assert names
    for name in names:
        family = name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in METRICS, name
        is_histogram = METRICS[family].type == "histogram"
        assert is_histogram == (family != name), name
        assert (METRICS[family].type == "gauge") == ("rate(" not in query), name
        by = [label for some in re.findall(r"by \(([^)]*)\)", query) for label in some.split(",")]
        filters = re.findall(r"[{,](\w+)=", query)
        known = {*METRICS[family].labels, "worker", *(["le"] if is_histogram else [])}
        assert {label.strip() for label in (*by, *filters)} <= known, name


def test_legends_name_labels_that_the_queries_keep() -> None:
    for panel in DASHBOARD["panels"]:
        for one in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", one["expr"]))))
            [name] = set(re.findall(r"carpool_\w+", one["expr"])) if not kept else [""]
            labels = kept or {*METRICS[name].labels, "worker"}
            assert set(re.findall(r"\{\{(\w+)\}\}", one["legendFormat"])) <= labels, one


def test_panels_lie_side_by_side_and_read_the_source_that_is_provisioned() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in DASHBOARD["panels"]]
    [source] = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]

    assert len(set(places)) == len(places)
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in COMPOSE["services"]
