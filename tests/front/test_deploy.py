"""What `deploy/` says of flags, paths, ports, stages and metrics is so."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from counting_executor import make_engine

import nanoserve
from nanoserve.cli.serve import parse_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(nanoserve.__file__).parent.parent
DEPLOY = ROOT / "deploy"
YAML = sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.yaml"))
# Of the Dockerfile language, what an image may have.
INSTRUCTIONS = {
    *("ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "VOLUME", "EXPOSE", "HEALTHCHECK"),
    *("STOPSIGNAL", "ENTRYPOINT", "USER"),
}


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments in one line."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ")[::2] for line in joined.splitlines()]
    assert {name for name, _ in found} == INSTRUCTIONS
    return [(name, " ".join(arguments.split())) for name, arguments in found]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stages it begins with included."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, arguments in instructions():
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            assert name and name not in found
            found[name] = [*found.get(base, ())]
            assert base in found or base.startswith("python:"), f"no stage {base}"
        elif name:
            found[name].append((instruction, arguments))
    return found


@pytest.mark.parametrize("name", YAML)
def test_yaml_is_yaml(name: str) -> None:
    assert isinstance(read(name), dict)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_a_server_as_nobody_special(target: str) -> None:
    found = stages()
    lines = found[target]
    last = dict(lines)
    assert last["USER"] == "nanoserve" and lines[-1][0] == "USER"
    entry = json.loads(last["ENTRYPOINT"])
    assert entry[:2] == ["nanoserve", "serve"]
    args = parse_args(entry[2:])
    assert args.host == "0.0.0.0" and str(args.port) == last["EXPOSE"]
    health = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
    assert f":{args.port}/health" in health[-1]
    compile(health[-1], "HEALTHCHECK", "exec")
    home = last["VOLUME"]
    for name, value in (part.split("=") for part in shlex.split(last["ENV"])):
        if name.endswith(("HOME", "DIR")):
            assert value.startswith(home), name
    (copied,) = (arguments for name, arguments in lines if name == "COPY")
    source = re.fullmatch(r"--from=(\S+) (\S+) \2", copied)
    built = found[source[1]]
    assert ("RUN", f"python -m venv {source[2]}") in built
    for name, arguments in built:
        if name == "COPY":
            *paths, _ = arguments.split()
            assert all((ROOT / path).exists() for path in paths), arguments


def test_an_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    runs = [arguments for name, arguments in instructions() if name == "RUN"]
    extras = [re.findall(r'"\.\[([\w,-]+)\]"', run) for run in runs if '".[' in run]
    assert len(extras) == 2
    for (names,) in extras:
        assert {*names.split(",")} <= project["optional-dependencies"].keys()
    (torch,) = (one for one in project["dependencies"] if one.startswith("torch"))
    assert sum(f'"{torch}"' in run for run in runs) == 2


def test_the_images_see_all_that_they_copy() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    seen = {line[1:] for line in ignored if line.startswith("!")}
    copies = [arguments for name, arguments in instructions() if name == "COPY"]
    paths = {path for copy in copies if "--from" not in copy for path in copy.split()[:-1]}
    assert paths == seen and "*" in ignored


def test_the_services_fit_the_images_and_files() -> None:
    for name in ("compose.yaml", "compose.cuda.yaml"):
        build = read(name)["services"]["nanoserve"]["build"]
        assert build["target"] in stages()
    compose = read("compose.yaml")
    build = compose["services"]["nanoserve"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    for name, service in compose["services"].items():
        for port in service["ports"]:
            assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), f"{name} is open to all: {port}"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_there = (
                (DEPLOY / source).exists() if source[0] == "." else source in compose["volumes"]
            )
            assert is_there, volume
        if "image" in service and "build" not in service:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    environments = [service.get("environment", {}) for service in compose["services"].values()]
    secrets = {name: value for one in environments for name, value in one.items()
               if name.endswith(("KEY", "PASSWORD"))}  # fmt: skip
    assert len(secrets) == 2 and all(":?" in value for value in secrets.values())


def test_the_flags_of_the_services_are_flags() -> None:
    args = parse_args(["--config", str(DEPLOY / "serve.yaml")])
    compose = read("compose.yaml")["services"]
    assert args.model_flag and args.grace_period < _seconds(
        compose["nanoserve"]["stop_grace_period"]
    )
    (mounted, *_) = compose["nanoserve"]["volumes"]
    assert mounted.split(":")[1] == compose["nanoserve"]["command"][1]
    text = (DEPLOY / "serve.yaml").read_text("utf-8")
    with_traces = yaml.safe_load(re.sub(r"^# (otlp-)", r"\1", text, flags=re.M))
    assert with_traces.keys() - yaml.safe_load(text).keys() == {"otlp-traces-endpoint"}
    assert with_traces["otlp-traces-endpoint"].startswith("http://jaeger:") and "jaeger" in compose
    parse_args(["--otlp-traces-endpoint", with_traces["otlp-traces-endpoint"]])


def _seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_prometheus_reads_the_server_and_grafana_prometheus() -> None:
    config = read("prometheus/prometheus.yaml")
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    service, port = target.split(":")
    services = read("compose.yaml")["services"]
    assert any(one.endswith(f":{port}") for one in services[service]["ports"])
    for name in config["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    name, port = source["url"].removeprefix("http://").split(":")
    assert any(one.endswith(f":{port}") for one in services[name]["ports"])
    (files,) = read("grafana/provisioning/dashboards/files.yaml")["providers"]
    mounts = {one.split(":")[1]: one.split(":")[0] for one in services["grafana"]["volumes"]}
    assert [*(DEPLOY / mounts[files["options"]["path"]]).glob("*.json")]


# ---------------------------------------------------------------- metrics


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The names of all samples that a server exports."""
    pytest.importorskip("prometheus_client", reason="pip install 'nanoserve[serve]'")
    from prometheus_client.parser import text_string_to_metric_families

    from nanoserve.features.metrics import exposition, start_metrics

    engine = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    start_metrics("m", "vllm:", engine)
    families = text_string_to_metric_families(exposition(engine).decode())
    return {sample.name for family in families for sample in family.samples} | {"up"}


NAME = re.compile(r"\b(?:vllm:\w+|process_\w+|up\b)")


def expressions() -> dict[str, str]:
    """The queries of the dashboard and of the alerts, by title."""
    board = json.loads((DEPLOY / "grafana/dashboards/nanoserve.json").read_text("utf-8"))
    found = {f"{panel['title']} {target['refId']}": target["expr"]
             for panel in board["panels"] for target in panel.get("targets", ())}  # fmt: skip
    (models,) = (one for one in board["templating"]["list"] if one["name"] == "model_name")
    found["models"] = models["query"]["query"]
    (group,) = read("prometheus/alerts.yaml")["groups"]
    return found | {rule["alert"]: rule["expr"] for rule in group["rules"]}


def test_every_metric_that_is_shown_exists(metrics: set[str]) -> None:
    found = expressions()
    assert len(found) > 40
    for title, expression in found.items():
        names = NAME.findall(expression)
        assert names and {*names} <= metrics, (title, {*names} - metrics)
        assert expression.count("(") == expression.count(")"), title
        if "_bucket" in expression:
            assert re.search(r"histogram_quantile\(0\.\d+, sum by \(le", expression), title


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = _module(DEPLOY / "make_dashboard.py")
    assert script.FILE.read_text("utf-8") == json.dumps(script.dashboard(), indent=1) + "\n"
    places = [panel["gridPos"] for panel in script.dashboard()["panels"]]
    cells = [(x, y) for one in places for x in range(one["x"], one["x"] + one["w"])
             for y in range(one["y"], one["y"] + one["h"])]  # fmt: skip
    assert len(cells) == len({*cells}) and max(x for x, _ in cells) == 23  # no two overlap


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- systemd


def unit() -> dict[str, list[str]]:
    """The settings of the unit, by name; a name may be there several times."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "nanoserve.service").read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_a_server_with_its_file() -> None:
    (command,) = unit()["ExecStart"]
    program, *arguments = shlex.split(command)
    assert Path(program).name == "nanoserve" and arguments[:2] == ["serve", "--config"]
    text = (DEPLOY / "nanoserve.service").read_text("utf-8")
    assert f"deploy/serve.yaml {arguments[2]}" in text
    args = parse_args(["--config", str(DEPLOY / "serve.yaml")])
    assert args.grace_period < int(unit()["TimeoutStopSec"][0])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd checks its units")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "nanoserve.service").read_text("utf-8")
    path = tmp_path / "nanoserve.service"
    path.write_text(text.replace("/opt/nanoserve/bin/nanoserve", sys.executable))
    shown = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
