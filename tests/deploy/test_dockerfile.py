"""The image has everything that pyproject.toml ships, and no habits that a linter of Dockerfiles objects to."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch

from tests.deploy.files import BIN, ROOT, deployments

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COPIED = [words.split() for words in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)]


def test_the_linter_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [str(BIN / "hadolint"), str(ROOT / "Dockerfile")], check=False, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_every_package_that_is_shipped_is_copied_under_its_name() -> None:
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [package for package in packages if [package, package] not in COPIED] == []


def test_what_the_build_reads_beside_the_packages_is_copied() -> None:
    project = PYPROJECT["project"]
    read = {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert read <= {source for *sources, _ in COPIED for source in sources}


def test_nothing_that_is_copied_is_kept_from_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [source for *sources, _ in COPIED for source in sources]
    assert [(source, rule) for source in sources for rule in ignored if fnmatch(source, rule)] == []


def test_the_user_is_the_one_that_kubernetes_is_told() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert f"useradd --uid {user} " in DOCKERFILE
    for deployment in deployments().values():
        assert deployment["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user)
