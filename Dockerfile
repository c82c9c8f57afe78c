# One image for all three services; the command chooses which.
FROM python:3.11-slim
# The compiler makes the attention kernels for the very processor, at the first start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tandem tandem
COPY engine engine
COPY draft_service draft_service
COPY target_service target_service
COPY orchestrator orchestrator
# Give PyTorch's index of CPU wheels here: pip's own choice is the CUDA build, gigabytes larger.
ARG PIP_EXTRA_INDEX_URL=""
RUN pip install --no-cache-dir --constraint constraints.txt ".[engine]" \
    && useradd --uid 10001 --create-home tandem && mkdir /models && chown tandem /models
# As a number, so that Kubernetes can see that it is not root.
USER 10001
VOLUME /models
