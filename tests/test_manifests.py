"""The manifests in `deploy/`: rendered, held against schemas, and their steps run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvdock_cli.arguments import settings_of
from kvdock_vllm.launch import launch

kubernetes_validate = pytest.importorskip("kubernetes_validate")

DEPLOY = Path(__file__).parents[1] / "deploy"
FOLDERS = ["engine", "node-disk", "volume-claim", "monitoring", "kserve"]
VERSION = "1.32"
CUSTOM = {
    # Kinds of operators: the fields of their `spec` that are used here.
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": {"groups"},
    "LLMInferenceService": {"model", "replicas", "router", "template"},
}
MODEL_SERVER = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "decode"},
    "spec": {
        "selector": {"matchLabels": {"a": "b"}},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "containers": [
                    {
                        "name": "modelserver",
                        "image": "vllm",
                        "command": ["/bin/bash", "-c"],
                        "args": ["exec vllm serve"],
                        "ports": [{"containerPort": 8000}],
                    }
                ]
            },
        },
    },
}
"""Like the model server of llm-d's guides."""

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")


def rendered(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder), "--load-restrictor=LoadRestrictionsNone"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def check(manifest: dict[str, Any]) -> None:
    """Hold a manifest against the schemas of Kubernetes."""
    if fields := CUSTOM.get(manifest["kind"]):
        assert manifest["spec"].keys() <= fields
        if pod := manifest["spec"].get("template"):
            check({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod})
        return
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def pods(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the specs of those pods that run an engine."""
    templates = [one["spec"].get("template") for one in manifests]
    specs = [one.get("spec", one) for one in templates if one]
    return [one for one in specs if any(v["name"] == "shm" for v in one["volumes"])]


@pytest.fixture
def llm_d(tmp_path: Path) -> Path:
    (tmp_path / "decode.yaml").write_text(yaml.safe_dump(MODEL_SERVER))
    component = os.path.relpath(DEPLOY / "llm-d", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["decode.yaml"], "components": [component]})
    )
    return tmp_path


@pytest.fixture(params=[*FOLDERS, "llm-d"])
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    folder = DEPLOY / request.param
    if request.param == "llm-d":
        folder = request.getfixturevalue("llm_d")
    return rendered(folder)


def test_manifests_are_what_kubernetes_takes(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        check(manifest)


def test_a_wrong_field_is_found() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        check(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {"vlumes": 1}}
        )


def test_each_engine_has_room_for_its_host_memory_and_owns_its_root(
    manifests: list[dict[str, Any]],
) -> None:
    for pod in pods(manifests):
        (container,) = pod["containers"]
        given = settings(container)
        (shm,) = [one for one in pod["volumes"] if one["name"] == "shm"]
        host = int(given["host_memory"].removesuffix(" GiB"))
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{host + 1}Gi"}
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts == {"kv": "/kv", "shm": "/dev/shm"}  # noqa: S108 - as vLLM does
        assert Path(given["root"]).parent == Path(mounts["kv"])
        assert pod["securityContext"]["runAsUser"] == 1000


def settings(container: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the adapter that an engine's container gives."""
    words = connector(container)["kv_connector_extra_config"]
    return dict(words)


def connector(container: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's --kv-transfer-config of a container."""
    variables = {one["name"]: one["value"] for one in container["env"]}
    if "VLLM_ADDITIONAL_ARGS" in variables:
        words = shlex.split(variables["VLLM_ADDITIONAL_ARGS"])
    else:
        assert container["command"] == ["kvdock", "run"]
        sets = [one.removeprefix("--set=") for one in container["args"] if "=" in one]
        sets = [one for one in sets if not one.startswith("--")]
        words = list(launch(["vllm", "serve", "M"], settings_of(tuple(sets))).flags)
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return found


def test_kserve_is_given_what_kvdock_run_would_add() -> None:
    (pod,) = pods(rendered(DEPLOY / "kserve"))
    (container,) = pod["containers"]
    given = connector(container)
    done = launch(["vllm", "serve", "M"], given["kv_connector_extra_config"])
    assert json.loads(done.flags[1]) == given
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert done.variables.items() <= variables.items()
    assert done.flags[2:] == shlex.split(variables["VLLM_ADDITIONAL_ARGS"])[:2]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
)
def test_the_directory_of_a_node_is_one_that_the_engine_can_use(tmp_path: Path) -> None:
    (made,) = [
        one for one in rendered(DEPLOY / "node-disk") if one["kind"] == "DaemonSet"
    ]
    (step,) = made["spec"]["template"]["spec"]["initContainers"]
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    kv = tmp_path / "kv"
    kv.mkdir()  # as the kubelet does, for root
    assert examined(kv / "engine").returncode != 0
    command = [word.replace("/kv", str(kv)) for word in step["command"]]
    subprocess.run(command, check=True)
    done = examined(kv / "engine")
    assert done.returncode == 0, done.stdout + done.stderr


def examined(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the doctor as the engine's user, who may also read where Python lies."""
    reads = "+dac_read_search"
    user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
    user += [f"--inh-caps={reads}", f"--ambient-caps={reads}"]
    command = [str(Path(sys.executable).with_name("kvdock")), "doctor", "file"]
    command += ["--set", f"root={root}", "--set", "free_space=1 MiB"]
    return subprocess.run(
        [*user, *command], capture_output=True, text=True, check=False,
        env=os.environ | {"HOME": str(root.parent)},
    )  # fmt: skip
