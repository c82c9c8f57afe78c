"""What a load test records reaches the processes of its users as it was."""

from loadtest.churn.requests import make_requests
from loadtest.recorded import Recorded, from_json, to_json


def test_every_option_that_load_tests_use_survives_the_way_to_another_process() -> None:
    requests = make_requests([f"prompt {number}" for number in range(64)], 64, seed=1)
    assert any("logit_bias" in options for _, options in requests)
    recorded = [Recorded(prompt, options, "text", (1, 2, 3)) for prompt, options in requests]
    assert from_json(to_json(recorded)) == recorded
