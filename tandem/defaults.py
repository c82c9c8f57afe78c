"""Limits that several processes have by default; here once, so that they fit each other."""

MAX_STEP_TOKENS = 512  # rows of one forward
MAX_DRAFT_TOKENS = 16  # a service makes or verifies in one round
NUM_DRAFT_TOKENS = 4  # of a round, unless the request says otherwise
MAX_SESSIONS = 256  # open at once; of an orchestrator: answers
MAX_TOKENS = 256  # of an answer, unless the request says otherwise
ORCHESTRATOR_ADDRESS = "127.0.0.1:50050"
