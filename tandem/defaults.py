"""Limits that several processes have by default; here once, so that they fit each other."""

MAX_STEP_TOKENS = 512  # rows of one forward
MAX_DRAFT_TOKENS = 16  # a service makes or verifies in one round
NUM_DRAFT_TOKENS = 4  # of a round, unless the request says otherwise
MAX_SESSIONS = 256  # open at once; of an orchestrator: answers
MAX_TOKENS = 256  # of an answer, unless the request says otherwise

# Who has had no item for so many seconds may lose its place and its memory to others. Between its rounds an active
# session has none for as long as the other side takes; if it could lose them then, one session more than there is room
# for would make all of them take each other's, round by round.
IDLE_S = 5.0
