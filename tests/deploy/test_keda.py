"""The autoscaling objects, of a kind kubernetes-validate does not know: fields, bounds, and the figures asked for."""

import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from tests.deploy.exported import SAMPLES, complaints
from tests.deploy.files import KEDA, ROOT, deployments, objects

# Of keda.sh/v1alpha1: the fields in use here, and no other.
_POLICIES = {
    "type": "object",
    "required": ["policies"],
    "additionalProperties": False,
    "properties": {
        "stabilizationWindowSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "policies": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["type", "value", "periodSeconds"],
                "additionalProperties": False,
                "properties": {
                    "type": {"enum": ["Pods", "Percent"]},
                    "value": {"type": "integer", "minimum": 1},
                    "periodSeconds": {"type": "integer", "minimum": 1, "maximum": 1800},
                },
            },
        },
    },
}
_TRIGGER = {
    "type": "object",
    "required": ["type", "metadata"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "prometheus"},
        "name": {"type": "string"},
        "metadata": {  # every value is a string there
            "type": "object",
            "required": ["serverAddress", "query", "threshold"],
            "additionalProperties": False,
            "properties": {
                "serverAddress": {"type": "string", "pattern": "^http://"},
                "query": {"type": "string"},
                "threshold": {"type": "string", "pattern": "^[0-9]+$"},
                "ignoreNullValues": {"enum": ["true", "false"]},
            },
        },
    },
}
SCALED_OBJECT = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": {
            "type": "object",
            "required": ["name", "namespace"],
            "additionalProperties": False,
            "properties": {"name": {"type": "string"}, "namespace": {"const": "tandem"}},
        },
        "spec": {
            "type": "object",
            "required": ["scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers"],
            "additionalProperties": False,
            "properties": {
                "scaleTargetRef": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {"name": {"type": "string"}},
                },
                "minReplicaCount": {"type": "integer", "minimum": 1},
                "maxReplicaCount": {"type": "integer", "minimum": 1},
                "pollingInterval": {"type": "integer", "minimum": 1},
                "fallback": {
                    "type": "object",
                    "required": ["failureThreshold", "replicas"],
                    "additionalProperties": False,
                    "properties": {
                        "failureThreshold": {"type": "integer", "minimum": 1},
                        "replicas": {"type": "integer", "minimum": 1},
                        "behavior": {"enum": ["static", "currentReplicas", "currentReplicasIfHigher"]},
                    },
                },
                "advanced": {
                    "type": "object",
                    "required": ["horizontalPodAutoscalerConfig"],
                    "additionalProperties": False,
                    "properties": {
                        "horizontalPodAutoscalerConfig": {
                            "type": "object",
                            "required": ["behavior"],
                            "additionalProperties": False,
                            "properties": {
                                "behavior": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {"scaleUp": _POLICIES, "scaleDown": _POLICIES},
                                }
                            },
                        }
                    },
                },
                "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
            },
        },
    },
}
VALIDATOR = Draft202012Validator(SCALED_OBJECT)
SELECTOR = re.compile(r'sum\((tandem_requests_(?:running|waiting))\{namespace="tandem",component="(\w+)"\}\)')


@pytest.fixture(params=objects(*KEDA), ids=lambda one: one["metadata"]["name"])
def scaled(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_it_has_the_fields_of_its_kind_and_no_other(scaled: dict[str, Any]) -> None:
    VALIDATOR.validate(scaled)
    scaled["spec"] = {**scaled["spec"], "minReplicas": 1}
    with pytest.raises(ValidationError, match="minReplicas"):
        VALIDATOR.validate(scaled)


def test_it_scales_a_deployment_that_exists_between_two_bounds(scaled: dict[str, Any]) -> None:
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] in deployments()
    assert 2 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert spec["fallback"]["replicas"] >= spec["minReplicaCount"]
    names = [trigger.get("name") for trigger in spec["triggers"]]
    assert len(set(names)) == len(names)


def test_every_query_is_of_requests_and_of_a_service_that_tells_them(scaled: dict[str, Any]) -> None:
    for trigger in scaled["spec"]["triggers"]:
        match = SELECTOR.fullmatch(trigger["metadata"]["query"])
        assert match is not None
        assert match[2] in deployments()
        assert complaints(trigger["metadata"]["query"]) == []


def test_every_metric_that_a_deployment_file_names_is_exported() -> None:
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    named = {(path.name, name) for path in files for name in re.findall(r"\btandem_\w+", path.read_text())}
    exported = set().union(*SAMPLES.values())
    assert {path for path, _ in named} == {"tandem.json", *(path.name for path in KEDA)}
    assert {one for one in named if one[1] not in exported} == set()


def test_each_service_is_scaled_by_itself_and_targets_by_what_waits() -> None:
    by_name = {one["spec"]["scaleTargetRef"]["name"]: one for one in objects(*KEDA)}
    assert by_name.keys() == deployments().keys()
    queries = [trigger["metadata"]["query"] for trigger in by_name["target"]["spec"]["triggers"]]
    assert any("tandem_requests_waiting" in query for query in queries)
