# syntax=docker/dockerfile:1
#
# CPU:   docker build -t carpool .
# Ray:   docker build -t carpool:ray --build-arg EXTRAS=video,otel,ray .
# CUDA:  docker build -t carpool:cuda --build-arg BASE=nvidia/cuda:13.0.2-runtime-ubuntu24.04 .
#
# BASE is any image of Debian or Ubuntu with Python 3.11 or newer, or packages of it. The wheels of
# torch bring the CUDA libraries that they need along; TORCH_INDEX names where smaller, CPU-only
# wheels of torch lie. docs/deployment.md says how to run it.

ARG BASE=python:3.12-slim-trixie

FROM ${BASE} AS build
ARG EXTRAS=video,otel
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip"; then \
      apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python3 -m venv /opt/carpool
WORKDIR /src
COPY requirements.lock requirements-ray.lock pyproject.toml README.md LICENSE ./
# Versions are those of the lock, so that a picture is the same wherever the image was built.
RUN if [[ -n "${TORCH_INDEX}" ]]; then \
      /opt/carpool/bin/pip install "$(grep '^torch==' requirements.lock)" --index-url "${TORCH_INDEX}"; \
    fi
COPY src ./src
RUN /opt/carpool/bin/pip install --constraint requirements.lock --constraint requirements-ray.lock ".[${EXTRAS}]"

FROM ${BASE}
# hadolint ignore=DL3008
RUN if ! command -v python3; then \
      apt-get update && apt-get install --yes --no-install-recommends python3 \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/carpool /opt/carpool
RUN useradd --create-home --uid 10001 carpool \
    && install -d -o carpool -g carpool /state /cache
USER 10001
WORKDIR /home/carpool
# Jobs and their files; models and learned costs.
ENV PATH=/opt/carpool/bin:${PATH} \
    CARPOOL_STATE_DIR=/state \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    PYTHONUNBUFFERED=1
VOLUME ["/state", "/cache"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
ENTRYPOINT ["carpool"]
CMD ["serve", "--host", "0.0.0.0", "--log-format", "json"]
