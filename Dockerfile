# An image with lit_rlhf and its pinned requirements.
#   CPU:  docker build -t lit-rlhf --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   CUDA: docker build -t lit-rlhf --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 .
# The CUDA image needs the compiler of a `devel` base, as DeepSpeed compiles its kernels when they are first used.
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" lit-rlhf fit --config ppo/paper_7b_en
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH_INDEX=
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=${TORCH_INDEX} DS_BUILD_OPS=0

# build-essential: DeepSpeed's kernels, and torch.compile
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/lit_rlhf
ENV PATH=/opt/lit_rlhf/bin:$PATH

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY lit_rlhf lit_rlhf
COPY callbacks callbacks
COPY configs configs
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt pip install -c constraints.txt .

WORKDIR /work
ENTRYPOINT ["lit_rlhf"]
CMD ["--help"]
