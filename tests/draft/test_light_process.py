"""A proposer without a model costs a process without torch."""

import subprocess
import sys


def test_the_draft_service_does_not_load_torch_before_a_model_is_wanted() -> None:
    code = "import sys, draft_service.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
