# An image with lit_rlhf and its pinned requirements.
#   CPU:  docker build -t lit-rlhf --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   CUDA: docker build -t lit-rlhf --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 .
# The CUDA image needs the compiler of a `devel` base, as DeepSpeed compiles its kernels when they are first used.
#   docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -e HOME=/tmp -v "$PWD:/work" lit-rlhf fit --config ppo/paper_7b_en
# For a release, give the base with its digest: --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 DS_BUILD_OPS=0

# build-essential: DeepSpeed's kernels, and torch.compile
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/lit_rlhf
ENV PATH=/opt/lit_rlhf/bin:$PATH

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
# Only torch comes from the index of its builds. All other archives, of build tools too, are checked against hashes.
# The last command adds what a CUDA build of torch pins for itself; a CPU build needs nothing.
ARG TORCH_INDEX=https://pypi.org/simple
RUN TORCH="$(grep '^torch==' requirements/constraints.txt)" \
    && pip install --no-deps --index-url "$TORCH_INDEX" "$TORCH" \
    && pip install --no-deps --require-hashes -r requirements/build_hashes.txt \
    && pip install --no-deps --require-hashes --no-build-isolation -r requirements/hashes.txt \
    && pip install -c requirements/constraints.txt "$TORCH"

COPY lit_rlhf lit_rlhf
COPY callbacks callbacks
COPY configs configs
RUN pip install --no-deps --no-build-isolation ./callbacks . && pip check

RUN useradd --create-home rlhf && install -d -o rlhf /work
USER rlhf
WORKDIR /work
ENTRYPOINT ["lit_rlhf"]
CMD ["--help"]
