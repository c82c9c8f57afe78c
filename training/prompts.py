"""What the target is asked while training text is made: users' questions it invents itself, and files to continue.

No prompt of an evaluation is among them: questions are sampled from the model, and the files that acceptance is
measured on (`EVALUATION_MODULES`) are left out.
"""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# How a user's message may begin; the model goes on from there, so the questions are of every kind.
OPENERS = (
    "Write a", "Write an email", "Write a short story about", "Write a poem", "Draft a", "Compose a", "Create a",
    "Imagine you are", "Pretend to be", "You are a", "Act as", "Describe", "Explain", "Explain how", "Explain why",
    "What is", "What are", "What was the", "Who", "Who wrote", "When did", "Where is", "Why do", "How do", "How many",
    "How can I", "Which", "Is it", "Can you", "Could you", "I need", "I want to", "Give me", "List", "Name", "Suggest",
    "Compare", "Discuss", "Analyze", "Evaluate the following", "Identify", "Classify", "Extract", "From the following",
    "Summarize", "Summarize the following article:", "Rewrite", "Translate German to English:", "Translate",
    "Correct the", "Answer the following question based on the text:", "Read the passage", "Context:", "Solve",
    "Calculate", "Find the", "If", "Suppose", "A train", "There are", "Given that", "Tom has", "A store sells",
    "Write a Python function", "Write a function that", "Implement", "Write a program", "Write a SQL query",
    "What does this code do?", "Fix the bug", "Develop a", "Design", "Provide", "In the field of", "Some people",
    "Let's", "Hello", "Please", "Tell me about", "Do you", "Should", "Outline", "Plan a",
)  # fmt: skip

# Twenty files of the standard library that no training text is made from.
EVALUATION_MODULES = (
    "argparse", "bisect", "calendar", "configparser", "csv", "dataclasses", "difflib", "fractions", "heapq",
    "ipaddress", "json/decoder", "logging/handlers", "mailbox", "queue",
    "shelve", "statistics", "string", "textwrap", "threading", "zipfile",
)  # fmt: skip

_MIN_LINES, _MAX_LINES = 4, 40


def stdlib() -> Path:
    """Where this Python keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def code_files() -> list[Path]:
    """Files to continue: the standard library's modules but the ones of the evaluation, and no tests."""
    root = stdlib()
    kept_out = {root / f"{name}.py" for name in EVALUATION_MODULES}
    files = [path for pattern in ("*.py", "*/*.py") for path in sorted(root.glob(pattern))]
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "turtledemo"}
    return [path for path in files if path not in kept_out and path.parent.name not in skipped]


def code_prompts(rng: random.Random) -> Iterator[str]:
    """For ever: some lines of some file, to be gone on with."""
    files = code_files()
    while True:
        lines = rng.choice(files).read_text("utf-8", errors="replace").splitlines(keepends=True)
        num_lines = rng.randint(_MIN_LINES, _MAX_LINES)
        if len(lines) > num_lines:
            start = rng.randrange(len(lines) - num_lines)
            yield "".join(lines[start : start + num_lines])
