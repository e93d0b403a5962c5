from typing import Any

import pytest

from aftexport.errors import UsageError
from aftserve.ray import deployment
from aftserve.ray.cluster import check_gpus


@pytest.mark.parametrize(
    ("resources", "refusal"),
    [({}, "got 0 in Ray"), ({"GPU": 1.0}, "got 1 in Ray"), ({"GPU": 2.0}, None)],
)
def test_missing_gpus_are_refused(
    resources: dict[str, float], refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for them without an end."""
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    check_gpus(2, 0, "--actors 2")
    if refusal is None:
        check_gpus(2, 1, "--actors 2")
        return
    with pytest.raises(UsageError, match=f"Expected 2 GPUs for --actors 2, {refusal}"):
        check_gpus(2, 1, "--actors 2")


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ({}, 1),
        ({"num_replicas": 3}, 3),
        ({"num_replicas": "auto"}, 1),
        ({"autoscaling_config": {"min_replicas": 0}}, 0),
        ({"autoscaling_config": {"min_replicas": 2}}, 2),
    ],
)
def test_first_replicas_follow_options(options: dict[str, Any], replicas: int) -> None:
    assert deployment._first_replicas(options) == replicas
