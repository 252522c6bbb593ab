"""The Kubernetes chart and the alerts."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from space_router.config import build, settings
from space_router.metrics import Metrics
from space_server.config import parse

ROOT = Path(__file__).parents[3]
VERSIONS = ["1.29", "1.33", "1.37"]
NAMES = ["small.yaml", "whole.yaml"]
ALL = [*NAMES, "keda.yaml"]
OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "InferencePool"}  # kinds that are not the API's own


def _render() -> Any:
    spec = importlib.util.spec_from_file_location("render", ROOT / "docker/manifests/render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RENDER = _render()
HELM = os.environ.get("HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm: set HELM, or put it on the PATH")


def objects(name: str) -> list[dict[str, Any]]:
    return list(filter(None, yaml.safe_load_all((ROOT / "docker/manifests" / name).read_text(encoding="utf-8"))))


def of_kind(name: str, kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects(name) if one["kind"] == kind}


def container(name: str, kind: str) -> dict[str, Any]:
    (one,) = of_kind(name, kind).values()
    (found,) = one["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("name", ALL)
def test_the_manifests_are_those_of_this_chart(name: str) -> None:
    first = (ROOT / "docker/manifests" / name).read_text(encoding="utf-8").partition("\n")[0]
    assert first.split()[-1] == RENDER.digest(), "run docker/manifests/render.py"


@needs_helm
@pytest.mark.parametrize("name", ALL)
def test_helm_makes_them_again(name: str) -> None:
    made = RENDER.rendered(HELM, RENDER.SETTINGS[name])
    assert made == (ROOT / "docker/manifests" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL)
def test_every_object_is_one_by_the_api_s_schema(name: str, version: str) -> None:
    found = objects(name)
    assert len(found) >= 6
    for one in found:
        if one["kind"] not in OPERATORS:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_field_would_be_seen() -> None:
    (one,) = of_kind("whole.yaml", "StatefulSet").values()
    one["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


def test_the_whole_has_every_part() -> None:
    assert sorted({one["kind"] for one in objects("whole.yaml")}) == [
        "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "PrometheusRule", "Service",
        "ServiceMonitor", "StatefulSet",
    ]  # fmt: skip
    monitor = of_kind("whole.yaml", "ServiceMonitor")["spaceserve"]["spec"]
    service = of_kind("whole.yaml", "Service")["spaceserve"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [end["port"] for end in monitor["endpoints"]] == [service["spec"]["ports"][0]["name"]]
    assert monitor["endpoints"][0]["path"] == "/metrics"


def test_the_alerts_are_the_chart_s_and_find_the_job_that_the_operator_makes() -> None:
    rules = of_kind("whole.yaml", "PrometheusRule")["spaceserve"]
    written = yaml.safe_load((ROOT / "docker/alerts.yml").read_text(encoding="utf-8"))
    assert rules["spec"] == written
    monitor = of_kind("whole.yaml", "ServiceMonitor")["spaceserve"]
    service = of_kind("whole.yaml", "Service")["spaceserve"]
    expressions = " ".join(rule["expr"] for rule in written["groups"][0]["rules"])
    assert set(re.findall(r'job="(.+?)"', expressions)) == {service["metadata"]["labels"][monitor["spec"]["jobLabel"]]}
    for one in (rules, monitor):
        assert one["metadata"]["labels"]["release"] == "kube-prometheus-stack"


@pytest.mark.parametrize("name", NAMES)
def test_router_and_worker_take_their_flags(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    router, worker = (container(name, kind)["args"] for kind in ("Deployment", "StatefulSet"))
    assert [router[0], worker[0]] == ["router", "worker"]
    for path in {"keys/keys", "hub/token", "tls/tls.crt", "tls/tls.key", "tls/ca.crt", "worker/secret"}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("a-secret-of-thirty-two-characters\n" if path == "worker/secret" else "sk-one\n")
    encrypted = [word for word in (*router, *worker) if "tls-" in word.partition("=")[0]]  # these need certificates
    assert len(encrypted) == (8 if name == "whole.yaml" else 0)
    assert {word[2:].partition("=")[0].replace("-", "_") for word in encrypted if word in router} <= settings().keys()
    router, worker = ([word for word in words if word not in encrypted] for words in (router, worker))
    here = [word.replace("/run/secrets", str(folder)) for word in router[1:]]
    flags = dict(word.removeprefix("--").split("=", 1) for word in here)
    config = build({key.replace("-", "_"): value for key, value in flags.items()}, {})
    assert (config.host, config.port) == ("0.0.0.0", 8080)
    assert config.worker_address[0] == "spaceserve-worker-0.spaceserve-worker.default.svc:50051"
    assert len(config.worker_address) == (8 if name == "whole.yaml" else 1)
    assert config.unproven_workers() == ([] if name == "small.yaml" else list(config.worker_address))
    settings_there = parse([word.replace("/run/secrets", str(folder)) for word in worker[1:]])
    assert settings_there.listen == "0.0.0.0:50051"
    assert (settings_there.why_open() is None) == (name == "small.yaml"), "whole.yaml has certificates, left out here"


@pytest.mark.parametrize("name", NAMES)
def test_addresses_are_the_names_of_the_stateful_set_s_pods(name: str) -> None:
    ((worker, pods),) = of_kind(name, "StatefulSet").items()
    service = of_kind(name, "Service")[pods["spec"]["serviceName"]]["spec"]
    (word,) = [word for word in container(name, "Deployment")["args"] if word.startswith("--worker-address=")]
    port = service["ports"][0]["port"]
    for number, address in enumerate(word.partition("=")[2].split(",")):
        assert address == f"{worker}-{number}.{pods['spec']['serviceName']}.default.svc:{port}"
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= pods["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_nobody_and_write_only_where_something_is_mounted(name: str) -> None:
    for kind in ("Deployment", "StatefulSet"):
        (one,) = of_kind(name, kind).values()
        pod, box = one["spec"]["template"]["spec"], container(name, kind)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["enableServiceLinks"] is False  # a Service of our name would set SPACESERVE_PORT
        assert box["securityContext"]["readOnlyRootFilesystem"]
        assert {"/data", "/tmp"} <= {mount["mountPath"] for mount in box["volumeMounts"]}
        claims = [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])]
        assert {mount["name"] for mount in box["volumeMounts"]} == {v["name"] for v in pod["volumes"]} | set(claims)


def test_secrets_are_files_and_never_words_of_a_command() -> None:
    (one,) = of_kind("whole.yaml", "Deployment").values()
    secrets = [v["secret"]["secretName"] for v in one["spec"]["template"]["spec"]["volumes"] if "secret" in v]
    assert sorted(secrets) == ["api-keys", "api-tls", "hub-token", "worker-tls"]
    for kind in ("Deployment", "StatefulSet"):
        plain = [one["name"] for one in container("whole.yaml", kind)["env"] if "value" in one]
        assert plain == ["OTEL_EXPORTER_OTLP_ENDPOINT"]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_router_and_worker_have_the_model_s_volume_and_the_variables(kind: str) -> None:
    (one,) = of_kind("whole.yaml", kind).values()
    box = container("whole.yaml", kind)
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in box["volumeMounts"]
    volumes = one["spec"]["template"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "checkpoints"}} in volumes
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token"}}}
    assert token in box["env"]


@pytest.mark.parametrize("name", NAMES)
def test_whoever_asks_the_router_speaks_https_where_it_has_a_certificate(name: str) -> None:
    box = container(name, "Deployment")
    scheme = "HTTPS" if any(word.startswith("--tls-cert=") for word in box["args"]) else "HTTP"
    assert scheme == ("HTTPS" if name == "whole.yaml" else "HTTP")
    assert {box[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")} == {scheme}
    for monitor in of_kind(name, "ServiceMonitor").values():
        assert [end["scheme"] for end in monitor["spec"]["endpoints"]] == [scheme.lower()]


def test_a_worker_gets_whole_gpus_and_memory_for_its_ranks() -> None:
    box = container("whole.yaml", "StatefulSet")
    assert box["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "--tensor-parallel=2" in box["args"]
    (one,) = of_kind("whole.yaml", "StatefulSet").values()
    shm = next(v for v in one["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_the_autoscaler_alone_says_how_many_workers_there_are() -> None:
    (pods,), (scaler,) = (
        of_kind("whole.yaml", "StatefulSet").values(),
        of_kind("whole.yaml", "HorizontalPodAutoscaler").values(),
    )
    assert "replicas" not in pods["spec"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == pods["metadata"]["name"]
    wanted = {metric["object"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    page = (ROOT / "docker/KUBERNETES.md").read_text(encoding="utf-8")
    adapter = yaml.safe_load(re.search(r"```yaml\n(rules:.*?)```", page, flags=re.DOTALL)[1])
    rules = adapter["rules"]["custom"]
    assert {rule["name"]["as"] for rule in rules} == wanted
    series = set(re.findall(r"^(spaceserve_\w+)", Metrics().render().decode(), flags=re.MULTILINE))
    assert {word for rule in rules for word in re.findall(r"spaceserve_\w+", rule["metricsQuery"])} <= series


def exact(**fields: Any) -> dict[str, Any]:
    """The JSON schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
TRIGGER = exact(
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=exact(serverAddress=TEXT, query=TEXT, threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"}),
)
SCALED_OBJECT = exact(
    scaleTargetRef=exact(apiVersion={"const": "apps/v1"}, kind={"const": "StatefulSet"}, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    pollingInterval=COUNT,
    triggers={"type": "array", "minItems": 3, "items": TRIGGER},
    advanced=exact(horizontalPodAutoscalerConfig=exact(behavior={"type": "object"})),
)
INFERENCE_POOL = exact(
    selector=exact(matchLabels={"type": "object", "additionalProperties": TEXT}),
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": exact(number=COUNT)},
    endpointPickerRef=exact(name=TEXT, port=exact(number=COUNT), failureMode={"enum": ["FailOpen", "FailClose"]}),
)


def series_of_this_router() -> set[str]:
    return set(re.findall(r"^(spaceserve_\w+)", Metrics().render().decode(), flags=re.MULTILINE))


def test_keda_scales_the_workers_by_series_that_there_are() -> None:
    assert {one["kind"] for one in objects("keda.yaml")} >= {"ScaledObject", "InferencePool", "ServiceMonitor"}
    assert "HorizontalPodAutoscaler" not in {one["kind"] for one in objects("keda.yaml")}
    (scaled,) = of_kind("keda.yaml", "ScaledObject").values()
    ((worker, pods),) = of_kind("keda.yaml", "StatefulSet").items()
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    jsonschema.validate(scaled["spec"], SCALED_OBJECT)
    assert scaled["spec"]["scaleTargetRef"]["name"] == worker
    assert "replicas" not in pods["spec"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    (service,) = [name for name in of_kind("keda.yaml", "Service") if name != worker]
    for query in queries:
        assert f'namespace="default",service="{service}"' in query
        assert set(re.findall(r"spaceserve_\w+", query)) <= series_of_this_router()
    assert 'state="queued"' in queries[0]
    (word,) = [word for word in container("keda.yaml", "Deployment")["args"] if word.startswith("--worker-address=")]
    assert len(word.split(",")) == scaled["spec"]["maxReplicaCount"], "the router knows all that may come"


def test_the_inference_pool_is_of_routers_and_its_picker_is_told_of_series_that_there_are() -> None:
    (pool,) = of_kind("keda.yaml", "InferencePool").values()
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], INFERENCE_POOL)
    selected = pool["spec"]["selector"]["matchLabels"].items()
    (router,) = of_kind("keda.yaml", "Deployment").values()
    (worker,) = of_kind("keda.yaml", "StatefulSet").values()
    assert selected <= router["spec"]["template"]["metadata"]["labels"].items()
    assert not selected <= worker["spec"]["template"]["metadata"]["labels"].items()
    assert "app.kubernetes.io/instance" not in dict(selected), "routers of all releases"
    (port,) = container("keda.yaml", "Deployment")["ports"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    page = (ROOT / "docker/KUBERNETES.md").read_text(encoding="utf-8")
    flags = yaml.safe_load(re.search(r"```yaml\n(inferenceExtension:.*?)```", page, flags=re.DOTALL)[1])
    flags_of_picker = flags["inferenceExtension"]["flags"]
    assert flags_of_picker.keys() == {
        "total-queued-requests-metric", "total-running-requests-metric", "kv-cache-usage-percentage-metric",
        "lora-info-metric", "cache-info-metric",
    }  # fmt: skip
    lines = Metrics().render().decode()
    for spec in flags_of_picker.values():
        name, _, label = spec.partition("{")
        key, _, value = label.rstrip("}").partition("=")
        series = f'{name}{{{key}="{value}"}} ' if label else name
        assert f"\n{series}" in lines, spec
        assert f"# TYPE {name} gauge\n" in lines, spec


@pytest.mark.parametrize(("name", "port"), [("small.yaml", None), ("whole.yaml", 50051)])
def test_clients_reach_grpc_by_the_service_where_it_is_enabled(name: str, port: int | None) -> None:
    box = container(name, "Deployment")
    (router,) = [one for key, one in of_kind(name, "Service").items() if not key.endswith("-worker")]
    flags = dict(word.removeprefix("--").split("=", 1) for word in box["args"] if "grpc" in word)
    assert build({key.replace("-", "_"): value for key, value in flags.items()}, {}).grpc_port == port
    wanted = {"http": 8080} if port is None else {"http": 8080, "grpc": port}
    assert {one["name"]: one["containerPort"] for one in box["ports"]} == wanted
    assert {one["targetPort"]: one["port"] for one in router["spec"]["ports"]} == wanted


@needs_helm
def test_one_port_for_both_protocols_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"router\.grpc\.port and router\.port are both 8080"):
        RENDER.rendered(HELM, "router.grpc.enabled=true,router.grpc.port=8080")


@needs_helm
def test_fewer_workers_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"autoscaling.minReplicas \(9\) is above autoscaling.maxReplicas \(8\)"):
        RENDER.rendered(HELM, "autoscaling.minReplicas=9")


@pytest.mark.parametrize("name", NAMES)
def test_probes_ask_what_the_server_answers_and_stopping_is_given_its_time(name: str) -> None:
    (one,) = of_kind(name, "Deployment").values()
    box = container(name, "Deployment")
    assert [box[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")] == [
        "/livez", "/livez", "/readyz",
    ]  # fmt: skip
    (drain,) = [float(word.partition("=")[2]) for word in box["args"] if word.startswith("--drain-timeout=")]
    assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain
    assert one["spec"]["strategy"] == {"type": "Recreate"}  # a worker serves one router


def test_values_have_their_schema_and_a_wrong_one_is_refused() -> None:
    schema = json.loads((ROOT / "docker/chart/values.schema.json").read_text())
    values = yaml.safe_load((ROOT / "docker/chart/values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert values.keys() == schema["properties"].keys() - {"global"}
    for part in ("router", "worker", "autoscaling", "monitoring", "inferencePool"):
        assert values[part].keys() == schema["properties"][part]["properties"].keys()
    grpc = {"router": {"grpc": {"enabled": True, "prot": 1}}}
    for wrong in ({"modle": "demo"}, {"env": [{"nmae": "A"}]}, {"modelVolume": {"name": "x"}}, grpc):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | wrong, schema)


@needs_helm
@pytest.mark.parametrize(
    "settings",
    [
        "worker.gpus=0,worker.storage=,networkPolicy=false",
        "router.arguments={--max-queue=9}",
        "model=/models/mine,modelVolume.hostPath.path=/srv/models,env[0].name=HF_ENDPOINT,env[0].value=http://hub",
    ],
)
def test_other_settings_make_valid_objects_too(settings: str) -> None:
    objects = [*filter(None, yaml.safe_load_all(RENDER.rendered(HELM, settings)))]
    assert {"Deployment", "Service"} <= {one["kind"] for one in objects}
    for one in objects:
        if one["kind"] not in OPERATORS:
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


@needs_helm
def test_the_chart_makes_a_secret_of_its_own_for_the_workers_port_where_no_other_is_given() -> None:
    def secrets(settings: str) -> tuple[list[str], set[str]]:
        found = [*filter(None, yaml.safe_load_all(RENDER.rendered(HELM, settings)))]
        made = [b64decode(one["data"]["secret"]).decode() for one in found if one["kind"] == "Secret"]
        pods = [one["spec"]["template"]["spec"] for one in found if one["kind"] in ("Deployment", "StatefulSet")]
        return made, {v["secret"]["secretName"] for pod in pods for v in pod["volumes"] if v["name"] == "worker-secret"}

    (first,), mounted = secrets("")
    assert len(first) == 48
    assert secrets("")[0] != [first], "no two releases share it"
    assert mounted == {"spaceserve-worker-port"}
    assert secrets("workerSecret=mine") == ([], {"mine"})
    assert secrets("tlsSecret=certificates") == ([], set())
    assert secrets("tlsSecret=certificates,workerSecret=mine") == ([], {"mine"})


@needs_helm
def test_a_certificate_among_the_router_s_arguments_makes_its_probes_https_too() -> None:
    made = RENDER.rendered(HELM, "router.arguments={--tls-cert=/models/a.crt,--tls-key=/models/a.key}")
    assert made.count("scheme: HTTPS") == 3


@needs_helm
def test_helm_finds_nothing_wrong() -> None:
    run = subprocess.run([str(HELM), "lint", "--strict", str(ROOT / "docker/chart")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def alerts(root: Path) -> dict[str, dict[str, Any]]:
    rules = yaml.safe_load((root / "docker/alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}


def promtool(root: Path, *words: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("there is no promtool here (Debian, Ubuntu: apt-get install prometheus)")
    run = subprocess.run([program, *words], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_promtool_takes_the_rules_and_the_configuration(root: Path) -> None:
    assert f"{len(alerts(root))} rules found" in promtool(root, "check", "rules", "docker/alerts.yml")
    assert "1 rule files found" in promtool(root, "check", "config", "docker/prometheus.yml")


def test_alerts_fire_at_the_figures_at_which_they_must_and_at_no_others(root: Path) -> None:
    assert "SUCCESS" in promtool(root, "test", "rules", "docker/alerts_test.yml")


def test_every_alert_is_tried_with_figures_of_more_than_one_server(root: Path) -> None:
    tried = {}
    for one in yaml.safe_load((root / "docker/alerts_test.yml").read_text(encoding="utf-8"))["tests"]:
        servers = {re.search(r'instance="(\w+)"', series["series"])[1] for series in one["input_series"]}
        fired = {
            reported["exp_labels"]["instance"] for rule in one["alert_rule_test"] for reported in rule["exp_alerts"]
        }
        assert fired < servers, one["name"]  # at least one fires, at least one does not
        assert fired, one["name"]
        tried.update(dict.fromkeys(rule["alertname"] for rule in one["alert_rule_test"] if rule["exp_alerts"]))
    assert tried.keys() == alerts(root).keys()
    assert len(tried) >= 10


def test_every_alert_has_its_paragraph_of_what_to_do_and_no_paragraph_is_of_none(root: Path) -> None:
    text = (root / "docker/README.md").read_text(encoding="utf-8")
    paragraphs = dict(re.findall(r"^### (Spaceserve\w+)\n\n(.+?)\n\n?(?=#|\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert paragraphs.keys() == alerts(root).keys()
    assert min(map(len, paragraphs.values())) > 200
    for name, rule in alerts(root).items():
        assert rule["annotations"]["runbook"] == f"docker/README.md#{name.lower()}"
        assert rule["labels"]["severity"] in {"page", "warn"}


def watched(root: Path) -> dict[str, list[str]]:
    """The rows of the guide's table of what to watch, by their first cell: query, what is normal, what to do."""
    page = (root / "router/guides/operate.md").read_text(encoding="utf-8")
    section = re.search(r"^## What to watch\n(.+?)^## ", page, flags=re.MULTILINE | re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:1] == "|"]
    return {what: rest for what, *rest in rows[2:]}


def test_what_to_watch_is_series_that_there_are_with_what_is_normal_and_what_to_do(root: Path) -> None:
    """By the snapshot of the series and their label values, and by the alert that each row leads to."""
    known = (root / "tests/house/snapshots/metrics.txt").read_text(encoding="utf-8").split("\n")
    rows = watched(root)
    assert len(rows) == 9
    assert {"tokens per step", "drafts off", "queue waiting", "KV use", "errors", "aborted"} < rows.keys()
    for what, (query, normal, cure) in rows.items():
        assert normal, what
        assert cure, what
        asked = re.findall(r"(spaceserve_\w+)(\{[^}]*\})?", " ".join((query, normal, cure)))
        assert asked, what
        for name, labels in asked:
            assert any(line.split("{")[0].split(" ")[0] == name for line in known), name
            assert not labels or name + labels in known, name + labels
        for runbook in re.findall(r"docker/README\.md#(\w+)", cure):
            assert runbook in {name.lower() for name in alerts(root)}, what


def test_promtool_takes_the_queries_of_what_to_watch(root: Path, tmp_path: Path) -> None:
    queries = [query.strip("`") for query, _, _ in watched(root).values()]
    rules = [{"record": f"watched:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "watched", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool(root, "check", "rules", str(tmp_path / "rules.yml"))


def test_alerts_ask_only_for_series_and_labels_that_there_are(root: Path) -> None:
    rendered = Metrics().render().decode()
    present = set(re.findall(r"^(spaceserve_\w+)", rendered, flags=re.MULTILINE))
    for name, rule in alerts(root).items():
        asked = set(re.findall(r"spaceserve_\w+", rule["expr"]))
        assert asked <= present, name
        for label in re.findall(r'(?:outcome|reason)="\w+"', rule["expr"]):
            assert label in rendered, name


def test_what_a_paragraph_names_exists(root: Path) -> None:
    """Panels in italics, flags of the server."""
    text = (root / "docker/README.md").read_text(encoding="utf-8").partition("## Alerts")[2]
    board = (root / "docker/grafana/spaceserve.json").read_text(encoding="utf-8")
    names = {name.replace("\n", " ") for name in re.findall(r"\*([A-Z][^*]+)\*", text)}
    assert {name for name in names if name not in board and name not in alerts(root)} == set()
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)}
    assert flags <= settings().keys()
